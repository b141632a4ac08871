"""Text encoders of keras-hub, with small configs and a generic layout map."""

import keras_hub

from tests.real.hub.common import VOCABULARY, backbone_case
from tests.real.hub.language import HEADS, SHORT

models = keras_hub.models

BACKBONES = {
    "BERT": lambda: models.BertBackbone(**HEADS, **SHORT),
    "ALBERT": lambda: models.AlbertBackbone(**HEADS, **SHORT, embedding_dim=16),
    "DistilBERT": lambda: models.DistilBertBackbone(**HEADS, **SHORT),
    "RoBERTa": lambda: models.RobertaBackbone(**HEADS, **SHORT),
    "XLM-RoBERTa": lambda: models.XLMRobertaBackbone(**HEADS, **SHORT),
    "DeBERTa 3": lambda: models.DebertaV3Backbone(
        **HEADS, **SHORT, bucket_size=8
    ),
    "ELECTRA": lambda: models.ElectraBackbone(
        vocab_size=VOCABULARY,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        embedding_dim=8,
        intermediate_dim=32,
        **SHORT,
    ),
    "FNet": lambda: models.FNetBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        hidden_dim=16,
        intermediate_dim=32,
        **SHORT,
    ),
    "RoFormer 2": lambda: models.RoformerV2Backbone(
        **HEADS, head_size=8, dropout=0.0
    ),
    "XLNet": lambda: models.XLNetBackbone(**HEADS),
    "ESM 2": lambda: models.ESM2Backbone(**HEADS, **SHORT),
    "T5": lambda: models.T5Backbone(**HEADS, dropout=0.0),
    "EdRec": lambda: models.EdRecBackbone(
        vocab_size=VOCABULARY,
        num_layers_enc=1,
        num_layers_dec=1,
        hidden_dim=16,
        intermediate_dim=32,
        num_heads=2,
    ),
    "Whisper": lambda: models.WhisperBackbone(
        **HEADS,
        num_mels=8,
        max_encoder_sequence_length=16,
        max_decoder_sequence_length=8,
    ),
}

CASES = {name: backbone_case(make) for name, make in BACKBONES.items()}
