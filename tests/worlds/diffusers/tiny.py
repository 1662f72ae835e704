"""Tiny pipelines of the real classes with random weights, saved as diffusers folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from omni_loop.messages import PayloadKind
from omni_loop.stage import Payload
from omni_loop.testing.stage_driver import Ask
from omni_loop.types import Op

HEIGHT, WIDTH = 16, 32
COSMOS: dict[str, Any] = {
    "height": HEIGHT,
    "width": WIDTH,
    "steps": 2,
    "dtype": "float32",
    "text_length": 160,
    "negative_prompt": "bad",
    "guardrail": False,
}
WAN = {key: value for key, value in COSMOS.items() if key != "guardrail"}
_CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'][0]['text'] }} {% endfor %}"


def save(folder: Path, kind: str, parts: dict[str, Any], **settings: Any) -> Path:
    """``parts`` as diffusers saves them, without constructing the pipeline."""
    index: dict[str, Any] = {"_class_name": kind, "_diffusers_version": "0.39.0", **settings}
    for name, part in parts.items():
        part.save_pretrained(str(folder / name))
        library = type(part).__module__.split(".")[0]
        index[name] = [library if library in ("diffusers", "transformers") else "diffusers", type(part).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def vae(seed: int = 0, **more: Any) -> Any:
    from diffusers import AutoencoderKLWan

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1], "num_res_blocks": 1, "temperal_downsample": [True, True],
        "scale_factor_spatial": 4, "latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [0.5, 1.5, 1.0, 0.7],
    }  # fmt: skip
    return AutoencoderKLWan(**{**sizes, **more})


def tokenizer() -> Any:
    """Of letters; unknown ones are one token."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz "])}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", chat_template=_CHAT
    )


def t5(kind: str) -> Any:
    import transformers

    torch.manual_seed(1)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}EncoderModel")(config)


def qwen() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(1)
    text = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 32, "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]},
        "rope_theta": 10000.0, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
        "fullatt_block_indexes": [0],
    }  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def cosmos_transformer(kind: type[Any] | None = None, **more: Any) -> Any:
    from diffusers import CosmosTransformer3DModel

    torch.manual_seed(2)
    sizes: dict[str, Any] = {
        "in_channels": 5, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1,
        "mlp_ratio": 2.0, "text_embed_dim": 16, "adaln_lora_dim": 4, "max_size": (8, 16, 16),
        "patch_size": (1, 2, 2), "concat_padding_mask": True, "extra_pos_embed_type": None,
    }  # fmt: skip
    return (kind or CosmosTransformer3DModel)(**{**sizes, **more})


_PROJECTION = {"use_crossattn_projection": True, "crossattn_proj_in_channels": 32, "encoder_hidden_states_channels": 16}


def cosmos2(folder: Path) -> Path:
    from diffusers import FlowMatchEulerDiscreteScheduler

    parts = {
        "transformer": cosmos_transformer(),
        "vae": vae(),
        "scheduler": FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        "text_encoder": t5("T5"),
        "tokenizer": tokenizer(),
    }
    return save(folder, "Cosmos2VideoToWorldPipeline", parts)


def cosmos25(folder: Path, transformer: Any = None) -> Path:
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(
        use_karras_sigmas=True,
        use_flow_sigmas=True,
        prediction_type="flow_prediction",
        sigma_max=200.0,
        sigma_min=0.01,
        final_sigmas_type="sigma_min",
    )
    parts = {
        "transformer": transformer or cosmos_transformer(**_PROJECTION),
        "vae": vae(),
        "scheduler": scheduler,
        "text_encoder": qwen(),
        "tokenizer": tokenizer(),
    }
    return save(folder, "Cosmos2_5_PredictBasePipeline", parts)


def action_transformer() -> Any:
    """One that listens: random layers of this width would hardly."""
    from omni_loop_worlds.diffusers.actions import ActionCosmosTransformer3DModel

    kind, sizes = ActionCosmosTransformer3DModel, {"action_dim": 3, "hidden_dim_in_action_embedder": 8}
    model = cosmos_transformer(kind, **sizes, **_PROJECTION)
    with torch.no_grad():
        for embed in (model.action_embedder_B_D, model.action_embedder_B_3D):
            embed.fc2.weight.mul_(20)
    return model


def wan_transformer(seed: int = 3, **more: Any) -> Any:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 12,
        "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 16, "num_layers": 1, "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32,
    }  # fmt: skip
    return WanTransformer3DModel(**{**sizes, **more})


def wan(folder: Path, parts: dict[str, Any] | None = None, **settings: Any) -> Path:
    """Without ``parts`` as Wan 2.2's: two transformers, one for the first steps and one for the last."""
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    if parts is None:
        parts = {"transformer": wan_transformer(3), "transformer_2": wan_transformer(4)}
        settings = {"boundary_ratio": 0.9}
    parts = {**parts, "scheduler": scheduler, "text_encoder": t5("UMT5"), "tokenizer": tokenizer()}
    parts.setdefault("vae", vae())
    return save(folder, "WanImageToVideoPipeline", parts, **settings)


def images(n: int) -> NDArray[np.uint8]:
    """Frames that differ."""
    return np.random.default_rng(0).integers(0, 256, (n, HEIGHT, WIDTH, 3), np.uint8)


def see(first: int, shown: NDArray[np.uint8], width: int, executed: int | None = None) -> Ask:
    """Recondition on ``shown`` from step ``first`` on."""
    rows = len(shown) - (first == 0) if executed is None else executed
    arrays = {"image": shown, "executed": np.zeros((rows, width), np.float32)}
    return Ask({"observation": Payload(PayloadKind.OBSERVATION, arrays)}, Op.RECONDITION, first, {"first_step": first})


def ahead(step: int, actions: NDArray[np.float32]) -> Ask:
    """Predict under ``actions``."""
    given = {"actions": Payload(PayloadKind.ACTIONS, {"actions": actions})}
    return Ask(given, Op.PREDICT, step, {"frames": len(actions), "steps": len(actions)})


def frames(outputs: Any) -> NDArray[np.int16]:
    return np.asarray(outputs["frames"].arrays["frames"]).astype(np.int16)


def wan21(folder: Path) -> Path:
    """Wan 2.1 also reads the frame through CLIP."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(5)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    parts = {
        "transformer": wan_transformer(image_dim=8, added_kv_proj_dim=24),
        "image_encoder": CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=8, patch_size=4)),
        "image_processor": CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
    }
    return wan(folder, parts)


def wan5b(folder: Path) -> Path:
    """Wan 2.2 5B: one transformer that is told the time of every token, and a VAE of residual blocks on patches."""
    more = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 8}
    parts = {"transformer": wan_transformer(in_channels=4), "vae": vae(**more)}
    return wan(folder, parts, expand_timesteps=True)
