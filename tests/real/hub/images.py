"""Image backbones of keras-hub, with small configs and a generic layout map."""

import keras_hub

from tests.real.hub.common import backbone_case

models = keras_hub.models

SIDE = 32
IMAGE = dict(image_shape=(SIDE, SIDE, 3))
PATCHES = dict(patch_size=8, num_layers=2, hidden_dim=16, num_heads=2)


def resnet():
    return models.ResNetBackbone(
        [64], [3], [64, 16], [2, 2], [1, 2], "basic_block", **IMAGE
    )


def mit():
    return models.MiTBackbone(
        layerwise_depths=[1, 1],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[2, 1],
        max_drop_path_rate=0.0,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        hidden_dims=[8, 16],
        **IMAGE,
    )


def efficientnet():
    return models.EfficientNetBackbone(
        stackwise_kernel_sizes=[3, 3],
        stackwise_num_repeats=[1, 1],
        stackwise_input_filters=[8, 8],
        stackwise_output_filters=[8, 16],
        stackwise_expansion_ratios=[1, 4],
        stackwise_squeeze_and_excite_ratios=[0.25, 0.25],
        stackwise_strides=[1, 2],
        stackwise_block_types=["v1", "v1"],
        stackwise_force_input_filters=[0, 0],
        stackwise_nores_option=[False, False],
        width_coefficient=1.0,
        depth_coefficient=1.0,
        dropout=0.0,
        input_shape=(SIDE, SIDE, 3),
    )


def mobilenet():
    return models.MobileNetBackbone(
        stackwise_expansion=[[8, 16]],
        stackwise_num_blocks=[2],
        stackwise_num_filters=[[8, 8]],
        stackwise_kernel_size=[[3, 3]],
        stackwise_num_strides=[[2, 1]],
        stackwise_se_ratio=[[0.25, None]],
        stackwise_activation=[["relu", "hard_swish"]],
        stackwise_padding=[[1, 1]],
        output_num_filters=16,
        depthwise_filters=8,
        depthwise_stride=1,
        depthwise_residual=True,
        last_layer_filter=16,
        squeeze_and_excite=0.5,
        input_num_filters=8,
        **IMAGE,
    )


def hgnet():
    return models.HGNetV2Backbone(
        depths=[1, 1],
        embedding_size=8,
        hidden_sizes=[16, 16],
        stem_channels=[3, 8, 8],
        hidden_act="relu",
        use_learnable_affine_block=False,
        stackwise_stage_filters=[(8, 8, 16, 1, 1, 3), (16, 8, 16, 1, 1, 3)],
        apply_downsample=[False, True],
        use_lightweight_conv_block=[False, False],
        **IMAGE,
    )


def vit_det():
    return models.ViTDetBackbone(
        hidden_size=16,
        num_layers=2,
        intermediate_dim=32,
        num_heads=2,
        global_attention_layer_indices=[1],
        patch_size=8,
        num_output_channels=8,
        window_size=2,
        **IMAGE,
    )


def retinanet():
    return models.RetinaNetBackbone(
        models.ResNetBackbone(
            [64],
            [3],
            [64, 8, 8, 8],
            [1] * 4,
            [1, 2, 2, 2],
            "basic_block",
            image_shape=(64, 64, 3),
        ),
        min_level=3,
        max_level=5,
        use_p5=False,
        image_shape=(64, 64, 3),
    )


def deeplab():
    return models.DeepLabV3Backbone(
        models.ResNetBackbone(
            [64],
            [3],
            [64, 8, 8, 8],
            [1] * 4,
            [1, 2, 2, 2],
            "basic_block",
            image_shape=(64, 64, 3),
        ),
        spatial_pyramid_pooling_key="P5",
        low_level_feature_key="P2",
        upsampling_size=8,
        dilation_rates=[1, 2],
        projection_filters=8,
        image_shape=(64, 64, 3),
    )


def depth_anything():
    return models.DepthAnythingBackbone(
        image_encoder=models.DINOV2Backbone(
            **PATCHES,
            intermediate_dim=32,
            image_shape=(SIDE, SIDE, 3),
            position_embedding_shape=(SIDE, SIDE, 3),
        ),
        reassemble_factors=[2, 1],
        neck_hidden_dims=[8, 8],
        fusion_hidden_dim=8,
        head_hidden_dim=8,
        head_in_index=-1,
        feature_keys=["stage1", "stage2"],
    )


BACKBONES = {
    "ResNet": resnet,
    "DenseNet": lambda: models.DenseNetBackbone([2, 2], growth_rate=8, **IMAGE),
    "EfficientNet": efficientnet,
    "MobileNet": mobilenet,
    "CSPNet": lambda: models.CSPNetBackbone(
        stem_filters=8,
        stem_kernel_size=3,
        stem_strides=1,
        stackwise_depth=[1, 1],
        stackwise_strides=[1, 2],
        stackwise_num_filters=[8, 16],
        block_type="dark_block",
        stage_type="dark",
        **IMAGE,
    ),
    "HGNet 2": hgnet,
    "Xception": lambda: models.XceptionBackbone(
        stackwise_conv_filters=[[8, 8], [16, 16]],
        stackwise_pooling=[True, False],
        **IMAGE,
    ),
    "RetinaNet": retinanet,
    "DeepLab 3": deeplab,
    "SegFormer": lambda: models.SegFormerBackbone(
        image_encoder=mit(), projection_filters=8
    ),
    "VGG": lambda: models.VGGBackbone([1, 1], [8, 16], **IMAGE),
    "ViT": lambda: models.ViTBackbone(
        (SIDE, SIDE, 3), 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
    ),
    "DeiT": lambda: models.DeiTBackbone(
        (SIDE, SIDE, 3),
        8,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
    ),
    "DINO 2": lambda: models.DINOV2Backbone(
        **PATCHES,
        intermediate_dim=32,
        position_embedding_shape=(SIDE, SIDE, 3),
        **IMAGE,
    ),
    "DINO 3": lambda: models.DINOV3Backbone(
        **PATCHES, intermediate_dim=32, num_register_tokens=2, **IMAGE
    ),
    "Swin": lambda: models.SwinTransformerBackbone(
        image_shape=(SIDE, SIDE, 3),
        embed_dim=8,
        depths=(2, 1),
        num_heads=(2, 2),
        window_size=4,
        drop_path=0.0,
    ),
    "MiT": mit,
    "ViTDet": vit_det,
    "Depth Anything": depth_anything,
}

# These models normalize by statistics of few numbers, which amplify rounding
# errors.
RATES = {"DenseNet": 1e-5, "DeepLab 3": 1e-5}
CASES = {
    name: backbone_case(make, rate=RATES.get(name, 1e-3))
    for name, make in BACKBONES.items()
}
