"""The keys of `genai_config.json` that matter here, and what each one that cannot be described stands for.

Gathered from what ONNX Runtime GenAI's builder writes and its runtime reads (0.18). `inference_metadata.yaml` describes
one decoder that takes tokens, has one key and one value port for each cached layer, and gives logits; a key below with
a reason declares something else.
"""

from __future__ import annotations

_PAGED = "a paged cache: its ports are blocks of a pool, not [batch, kv_heads, capacity, head_dim]"
_CROSS = "an encoder-decoder model: its cross-attention cache and encoder inputs have no schema yet"
_STATE = "recurrent or convolution state has no schema yet"
_SCALES = "a cache quantised with a scale for each token has no schema yet"
_COMBINED = "key and value of a layer share one port; the schema needs a port for each"
_OTHER = "an input that the schema has no field for"

REFUSED_INPUTS = {
    "inputs_embeds": "the decoder takes embeddings, not tokens",
    "past_names": _COMBINED,
    "cross_past_key_names": _CROSS,
    "cross_past_value_names": _CROSS,
    "encoder_hidden_states": _CROSS,
    "encoder_attention_mask": _CROSS,
    "block_table": _PAGED,
    "block_table_windowed": _PAGED,
    "cumulative_sequence_lengths": _PAGED,
    "past_sequence_lengths": _PAGED,
    "attention_metadata": _PAGED,
    "logits_indices": _PAGED,
    "past_conv_names": _STATE,
    "past_recurrent_names": _STATE,
    "rnn_states_prev": _STATE,
    "lstm_hidden_state": _STATE,
    "lstm_cell_state": _STATE,
    "state_update_capture_count": _STATE,
    "state_update_active": _STATE,
    "past_key_scale_names": _SCALES,
    "past_value_scale_names": _SCALES,
    "past_key_values_length": _OTHER,
    "past_sequence_length": _OTHER,
    "current_sequence_length": _OTHER,
    "total_sequence_length": _OTHER,
    "cache_indirection": _OTHER,
    "hidden_states": "a drafter that continues another model's hidden states, not a decoder of its own",
    "per_layer_inputs": _OTHER,
    "targets": _OTHER,
    "targets_length": _OTHER,
}
"""Keys of `model.decoder.inputs` that refuse the model, each with the reason."""

REFUSED_OUTPUTS = {
    "present_names": _COMBINED,
    "output_cross_qk_names": _CROSS,
    "present_conv_names": _STATE,
    "present_recurrent_names": _STATE,
    "rnn_states": _STATE,
    "lstm_hidden_state": _STATE,
    "lstm_cell_state": _STATE,
    "state_update_conv_value_names": _STATE,
    "state_update_recurrent_capsule_names": _STATE,
    "present_key_scale_names": _SCALES,
    "present_value_scale_names": _SCALES,
}
"""Keys of `model.decoder.outputs` that refuse the model, each with the reason."""

REFUSED_DECODER = {
    "pipeline": "the decoder is split into a pipeline of graphs; the schema describes one",
    "state_groups": "a paged cache, or recurrent and convolution state, has no schema yet",
}
"""Keys of `model.decoder` that refuse the model where they hold anything, each with the reason."""

REFUSED_MODEL = {
    "encoder": _CROSS,
    "joiner": "a transducer's joiner has no schema",
}
"""Keys of `model` that refuse the model where they hold anything, each with the reason."""

DRAFTERS = ("draft", "mtp", "dflash2", "dspark")
"""Keys of `model` that describe a second, speculating model; the decoder beside it is described all the same."""

ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Values of `model.decoder.layer_types` whose layers have a KV cache and nothing else."""

KNOWN = {
    "": {"model", "search", "speculative", "engine"},
    "model": {
        *("type", "tokenizer_dir", "vocab_size", "context_length"),
        *("decoder", "embedding", "vision", "speech", "vad"),
        *("pad_token_id", "eos_token_id", "bos_token_id", "sep_token_id", "decoder_start_token_id"),
        *("image_token_id", "audio_token_id", "boa_token_id", "video_token_id", "vision_start_token_id"),
        *("bot_token_id", "eot_token_id", "bor_token_id", "eor_token_id"),
        *REFUSED_MODEL,
        *DRAFTERS,
    },
    "model.decoder": {
        *("session_options", "run_options", "filename", "inputs", "outputs", "shared_initializers"),
        *("hidden_size", "head_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"),
        *("sliding_window", "layer_types", "conv_cache_size", "state_update_capacity"),
        *REFUSED_DECODER,
    },
    "model.decoder.inputs": {
        *("input_ids", "attention_mask", "position_ids", "past_key_names", "past_value_names"),
        *REFUSED_INPUTS,
    },
    "model.decoder.outputs": {
        *("logits", "present_key_names", "present_value_names", "hidden_states", "aux_hidden_states"),
        *REFUSED_OUTPUTS,
    },
    "model.decoder.sliding_window": {
        *("window_size", "pad_value", "alignment", "slide_key_value_cache", "slide_inputs", "layers", "cache_slack"),
    },
}
"""The keys that are understood in each block that is read; any other key there is a warning."""
