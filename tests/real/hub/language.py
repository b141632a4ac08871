"""Language models of keras-hub, with small configs and a generic layout map."""

import dataclasses

import keras_hub

from tests.real.hub.common import VOCABULARY, language_case, prompt_of

models = keras_hub.models

# Constructor arguments of the model families.
HEADS = dict(
    vocabulary_size=VOCABULARY,
    num_layers=2,
    num_heads=2,
    hidden_dim=16,
    intermediate_dim=32,
)
QUERIES = dict(
    vocabulary_size=VOCABULARY,
    num_layers=2,
    num_query_heads=4,
    num_key_value_heads=2,
    hidden_dim=16,
    intermediate_dim=32,
)
SHORT = dict(dropout=0.0, max_sequence_length=16)
EXPERTS = dict(QUERIES, moe_intermediate_dim=16, num_experts=4, top_k=2)
SMOL = dict(
    vocabulary_size=VOCABULARY,
    hidden_dim=16,
    intermediate_dim=32,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_bias=False,
    attention_dropout=0.0,
    rope_layer_enabled_list=[True, False],
    layer_types=["full_attention"] * 2,
    mlp_bias=False,
    layer_norm_epsilon=1e-6,
    max_position_embeddings=16,
    rope_theta=10000.0,
    partial_rotary_factor=1.0,
)
T5GEMMA = dict(
    vocabulary_size=VOCABULARY,
    **{
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in dict(
            hidden_dim=16,
            intermediate_dim=32,
            num_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            layer_types=["full_attention"] * 2,
        ).items()
    },
    cross_attention_hidden_size=16,
    sliding_window=4,
    query_pre_attn_scalar=4.0,
)

BACKBONES = {
    "GPT-2": (
        models.GPT2CausalLM,
        lambda: models.GPT2Backbone(**HEADS, **SHORT),
    ),
    "GPT-NeoX": (
        models.GPTNeoXCausalLM,
        lambda: models.GPTNeoXBackbone(**HEADS, **SHORT),
    ),
    "OPT": (models.OPTCausalLM, lambda: models.OPTBackbone(**HEADS, **SHORT)),
    "Bloom": (models.BloomCausalLM, lambda: models.BloomBackbone(**HEADS)),
    "Falcon": (
        models.FalconCausalLM,
        lambda: models.FalconBackbone(
            vocabulary_size=VOCABULARY,
            num_layers=2,
            num_attention_heads=2,
            hidden_dim=16,
            intermediate_dim=32,
        ),
    ),
    "Gemma": (
        models.GemmaCausalLM,
        lambda: models.GemmaBackbone(**QUERIES, head_dim=4),
    ),
    "Gemma 3": (
        models.Gemma3CausalLM,
        lambda: models.Gemma3Backbone(
            **QUERIES,
            head_dim=4,
            image_size=16,
            vision_encoder=None,
            use_sliding_window_attention=True,
            sliding_window_size=4,
        ),
    ),
    "Llama": (models.LlamaCausalLM, lambda: models.LlamaBackbone(**QUERIES)),
    "Llama 3": (
        models.Llama3CausalLM,
        lambda: models.Llama3Backbone(**QUERIES),
    ),
    "Mistral": (
        models.MistralCausalLM,
        lambda: models.MistralBackbone(**QUERIES, sliding_window=4),
    ),
    "Mixtral": (
        models.MixtralCausalLM,
        lambda: models.MixtralBackbone(**QUERIES, num_experts=4),
    ),
    "Phi-3": (
        models.Phi3CausalLM,
        lambda: models.Phi3Backbone(
            **QUERIES, max_sequence_length=16, pretraining_sequence_length=16
        ),
    ),
    "Qwen": (models.QwenCausalLM, lambda: models.QwenBackbone(**QUERIES)),
    "Qwen MoE": (
        models.QwenMoeCausalLM,
        lambda: models.QwenMoeBackbone(
            **EXPERTS, shared_expert_intermediate_dim=32
        ),
    ),
    "Qwen 3": (
        models.Qwen3CausalLM,
        lambda: models.Qwen3Backbone(**QUERIES, head_dim=4),
    ),
    "Qwen 3 MoE": (
        models.Qwen3MoeCausalLM,
        lambda: models.Qwen3MoeBackbone(**EXPERTS, head_dim=4),
    ),
    "Qwen 3.5": (
        models.Qwen3_5CausalLM,
        lambda: models.Qwen3_5Backbone(
            **QUERIES,
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=4,
            linear_value_head_dim=4,
            layer_types=["linear_attention", "full_attention"],
        ),
    ),
    "GPT OSS": (
        models.GptOssCausalLM,
        lambda: models.GptOssBackbone(
            **QUERIES, num_experts=4, sliding_window=4, head_dim=4
        ),
    ),
    "SmolLM 3": (
        models.SmolLM3CausalLM,
        lambda: models.SmolLM3Backbone(**SMOL),
    ),
    "RWKV 7": (
        models.RWKV7CausalLM,
        lambda: models.RWKV7Backbone(
            hidden_size=16,
            head_size=4,
            num_layers=2,
            vocabulary_size=VOCABULARY,
            intermediate_dim=32,
            gate_lora=4,
            mv_lora=4,
            aaa_lora=4,
            decay_lora=4,
        ),
    ),
    "BART": (
        models.BartSeq2SeqLM,
        lambda: models.BartBackbone(**HEADS, **SHORT),
    ),
    "T5 Gemma": (
        models.T5GemmaSeq2SeqLM,
        lambda: models.T5GemmaBackbone(**T5GEMMA),
    ),
}


def step_of_gemma3(model):
    """Generates with Gemma 3 without images; `generate` requires images."""
    prompt = prompt_of(model)
    return model.make_generate_function()(prompt, stop_token_ids=None)[
        "token_ids"
    ]


CASES = {
    name: language_case(task, make) for name, (task, make) in BACKBONES.items()
}
CASES["Gemma 3"] = dataclasses.replace(
    CASES["Gemma 3"], generate=step_of_gemma3
)
# The model only generates from prompts of its own tokenizer.
CASES["RWKV 7"] = dataclasses.replace(CASES["RWKV 7"], generate=None)
