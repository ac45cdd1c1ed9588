"""Models of transformers and peft, made from configurations without a download.

They are left out where the libraries are missing.
"""

from importlib.util import find_spec

from torch import Tensor, nn

__all__ = ["Causal", "Experts", "Sequence", "Translation", "has_peft", "has_transformers"]


def has_transformers() -> bool:
    return find_spec("transformers") is not None


def has_peft() -> bool:
    return has_transformers() and find_spec("peft") is not None


class Causal(nn.Module):
    """A Llama-like model of transformers with grouped keys.

    With a rank, it is frozen under peft's LoRA.

    Args:
        vocabulary, width, depth: Its sizes.
        rank: Of LoRA; 0 trains everything.
    """

    def __init__(self, *, vocabulary: int, width: int, depth: int, rank: int = 0) -> None:
        super().__init__()
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=width // 64,
            num_key_value_heads=max(width // 128, 1),
            intermediate_size=3 * width,
            use_cache=False,
        )
        model = transformers.LlamaForCausalLM(config)
        if rank:
            import peft

            targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
            model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM"))
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class Sequence(nn.Module):
    """BERT of transformers, classifying."""

    def __init__(self, *, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        import transformers

        config = transformers.BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=width // 64,
            intermediate_size=4 * width,
            num_labels=8,
        )
        self.model = transformers.BertForSequenceClassification(config)

    def forward(self, tokens: Tensor, padded: Tensor, label: Tensor) -> Tensor:
        return self.model(input_ids=tokens, attention_mask=(~padded).long(), labels=label).loss


class Translation(nn.Module):
    """T5 of transformers: encoder and decoder with learned attention biases."""

    def __init__(self, *, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        import transformers

        config = transformers.T5Config(
            vocab_size=vocabulary,
            d_model=width,
            d_ff=3 * width,
            d_kv=64,
            num_layers=depth,
            num_heads=width // 64,
            decoder_start_token_id=0,
            use_cache=False,
        )
        self.model = transformers.T5ForConditionalGeneration(config)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.model(input_ids=source, labels=target).loss


class Experts(nn.Module):
    """Mixtral of transformers: two of several experts for each token, all in grouped products."""

    def __init__(self, *, vocabulary: int, width: int, depth: int, experts: int) -> None:
        super().__init__()
        import transformers

        config = transformers.MixtralConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            intermediate_size=2 * width,
            num_local_experts=experts,
            use_cache=False,
            experts_implementation="grouped_mm",
        )
        self.model = transformers.MixtralForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss
