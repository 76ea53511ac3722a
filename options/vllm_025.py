"""
What only version 0.25 of vLLM needs. To be removed together with it.
"""
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from model import head_logits


def compute_logits_in_float32(llm):
    """Let a vllm.LLM compute its logits in float32. Later versions have the setting head_dtype."""
    def apply(head, hidden, bias=None):
        return head_logits(hidden, head.weight, bias)

    def patch(model):
        # The embedding may be the head as well. It calls `apply` only to compute logits.
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.apply = apply

    llm.apply_model(patch)
