"""Backbones of keras-hub for audio and other data, with a generic map."""

import keras_hub
import numpy as np

from tests.real.hub.common import (
    CLASSES,
    SAMPLES,
    VOCABULARY,
    backbone_case,
    classifier,
    contrastive_case,
    inputs_of,
)
from tests.real.hub.images import PATCHES
from tests.real.hub.language import QUERIES
from tests.real.models import ModelCase

models = keras_hub.models
layers = keras_hub.layers

SIDE = 32
TEXT = dict(
    vocabulary_size=VOCABULARY,
    embedding_dim=16,
    hidden_dim=16,
    num_layers=2,
    num_heads=2,
    intermediate_dim=32,
    max_sequence_length=8,
)
VISION = dict(PATCHES, intermediate_dim=32, image_shape=(SIDE, SIDE, 3))


def clip():
    return models.CLIPBackbone(
        models.CLIPVisionEncoder(**VISION),
        models.CLIPTextEncoder(**TEXT),
        projection_dim=16,
    )


def siglip():
    return models.SigLIPBackbone(
        models.SigLIPVisionEncoder(**VISION), models.SigLIPTextEncoder(**TEXT)
    )


def pali_gemma():
    return models.PaliGemmaBackbone(
        **QUERIES,
        head_dim=4,
        image_size=SIDE,
        vit_patch_size=8,
        vit_num_heads=2,
        vit_hidden_dim=16,
        vit_num_layers=1,
        vit_intermediate_dim=32,
    )


def sam():
    side = 64
    return models.SAMBackbone(
        image_encoder=models.ViTDetBackbone(
            hidden_size=16,
            num_layers=2,
            intermediate_dim=32,
            num_heads=2,
            global_attention_layer_indices=[1],
            patch_size=16,
            num_output_channels=8,
            window_size=2,
            image_shape=(side, side, 3),
        ),
        prompt_encoder=layers.SAMPromptEncoder(
            hidden_size=8,
            image_embedding_size=(4, 4),
            input_image_size=(side, side),
            mask_in_channels=16,
        ),
        mask_decoder=layers.SAMMaskDecoder(
            num_layers=1,
            hidden_size=8,
            intermediate_dim=16,
            num_heads=2,
            embedding_dim=8,
            num_multimask_outputs=3,
            iou_head_depth=2,
            iou_head_hidden_dim=8,
        ),
    )


# Outputs of SAM that have one row per sample.
SAM_OUTPUTS = ["image_embeddings", "prompt_sparse_embeddings"]


def inputs_of_sam(model):
    """Returns inputs with one point, one box and no mask per image."""
    inputs = {
        **inputs_of(model),
        "labels": np.ones((SAMPLES, 1), np.float32),
        "masks": np.zeros((SAMPLES, 0, 64, 64, 1), np.float32),
    }
    rng = np.random.default_rng(1)
    inputs["points"] = rng.uniform(0, 64, (SAMPLES, 1, 2)).astype(np.float32)
    inputs["boxes"] = rng.uniform(0, 64, (SAMPLES, 1, 2, 2)).astype(np.float32)
    return inputs, np.arange(SAMPLES) % CLASSES


def vae():
    # The VAE is imported from a private module, because only complete image
    # generators are public.
    from keras_hub.src.models.vae.vae_backbone import VAEBackbone

    return VAEBackbone(
        [32, 32], [1, 1], [32, 32], [1, 1], image_shape=(SIDE, SIDE, 3)
    )


def stable_diffusion():
    """Returns the part that is trained; other parts are pretrained."""
    return models.StableDiffusion3Backbone(
        mmdit_patch_size=2,
        mmdit_hidden_dim=16,
        mmdit_num_layers=2,
        mmdit_num_heads=2,
        mmdit_position_size=16,
        mmdit_qk_norm=None,
        mmdit_dual_attention_indices=None,
        vae=vae(),
        clip_l=models.CLIPTextEncoder(**TEXT, intermediate_output_index=-2),
        clip_g=models.CLIPTextEncoder(**TEXT, intermediate_output_index=-2),
        latent_channels=4,
        image_shape=(SIDE, SIDE, 3),
    ).diffuser


def flux():
    return models.FluxBackbone(
        input_channels=8,
        hidden_size=16,
        mlp_ratio=2.0,
        num_heads=2,
        depth=1,
        depth_single_blocks=1,
        axes_dim=[2, 2, 4],
        theta=10_000,
        use_bias=True,
        image_shape=(16, 8),
        text_shape=(8, 8),
        image_ids_shape=(16, 3),
        text_ids_shape=(8, 3),
        y_shape=(8,),
    )


def parseq():
    return models.PARSeqBackbone(
        models.ViTBackbone(
            (SIDE, SIDE, 3),
            8,
            num_layers=1,
            num_heads=2,
            hidden_dim=16,
            mlp_dim=32,
            use_class_token=False,
        ),
        vocabulary_size=VOCABULARY,
        max_label_length=8,
        decoder_hidden_dim=16,
        num_decoder_layers=1,
        num_decoder_heads=2,
        decoder_mlp_dim=32,
        dropout_rate=0.0,
        attention_dropout=0.0,
    )


def moonshine():
    return models.MoonshineBackbone(
        vocabulary_size=VOCABULARY,
        filter_dim=16,
        encoder_num_layers=1,
        decoder_num_layers=1,
        hidden_dim=16,
        intermediate_dim=32,
        encoder_num_heads=2,
        decoder_num_heads=2,
    )


def inputs_of_moonshine(model):
    """Returns inputs whose audio is long enough for the strides."""
    return inputs_of(
        model, encoder_input_values=2000, encoder_padding_mask=2000
    ), np.arange(SAMPLES) % CLASSES


def video_prism():
    return models.VideoPrismBackbone(
        num_frames=2,
        patch_size=8,
        hidden_dim=16,
        intermediate_dim=32,
        num_heads=2,
        num_spatial_layers=1,
        num_temporal_layers=1,
        num_auxiliary_layers=0,
        image_shape=(SIDE, SIDE, 3),
    )


CASES = {
    "CLIP": contrastive_case(clip),
    "SigLIP": contrastive_case(siglip),
    "PaliGemma": backbone_case(pali_gemma),
    "SAM": ModelCase(lambda: classifier(sam(), SAM_OUTPUTS), inputs_of_sam),
    "Stable Diffusion 3": backbone_case(stable_diffusion),
    "VAE": backbone_case(vae),
    "Flux": backbone_case(flux),
    "PARSeq": backbone_case(parseq),
    "Moonshine": ModelCase(
        lambda: classifier(moonshine(), ["decoder_sequence_output"]),
        inputs_of_moonshine,
    ),
    "VideoPrism": backbone_case(video_prism),
}
