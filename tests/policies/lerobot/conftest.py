"""Small LeRobot checkpoints with random weights and statistics, in LeRobot's own format, made when first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

Checkpoints = Callable[..., Path]
ACTION_DIM = 3
STATE, ENV, IMAGE = ("STATE", (4,)), ("ENV", (6,)), ("VISUAL", (3, 64, 64))
VECTORS = {"observation.state": STATE, "observation.environment_state": ENV}
CAMERA = {"observation.state": STATE, "observation.image": IMAGE}
TOP = {"observation.state": STATE, "observation.images.top": ("VISUAL", (3, 32, 32))}
FLOW = {"chunk_size": 8, "n_action_steps": 4, "max_state_dim": 8, "max_action_dim": 8, "tokenizer_max_length": 16}
SMALL_BACKBONE = {"pretrained_backbone_weights": None}
DIFFUSION = {
    "horizon": 8,
    "n_action_steps": 4,
    "n_obs_steps": 2,
    "down_dims": (16, 32),
    "diffusion_step_embed_dim": 8,
    "num_train_timesteps": 10,
    "num_inference_steps": 3,
    **SMALL_BACKBONE,
}
KINDS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "act": (
        "act",
        VECTORS,
        {
            "chunk_size": 6,
            "n_action_steps": 4,
            "dim_model": 32,
            "n_heads": 2,
            "dim_feedforward": 32,
            "n_encoder_layers": 1,
            "n_vae_encoder_layers": 1,
            "latent_dim": 4,
            **SMALL_BACKBONE,
        },
    ),
    "ddpm": ("diffusion", VECTORS, {**DIFFUSION, "noise_scheduler_type": "DDPM"}),
    "ddim": ("diffusion", VECTORS, {**DIFFUSION, "noise_scheduler_type": "DDIM"}),
    "vqbet": (
        "vqbet",
        CAMERA,
        {
            "n_obs_steps": 3,
            "n_action_pred_token": 2,
            "action_chunk_size": 4,
            "crop_shape": None,
            "use_group_norm": True,
            "spatial_softmax_num_keypoints": 4,
            "gpt_input_dim": 16,
            "gpt_output_dim": 16,
            "gpt_n_layer": 1,
            "gpt_n_head": 2,
            "gpt_hidden_dim": 16,
            "vqvae_n_embed": 8,
            "vqvae_embedding_dim": 8,
            "vqvae_enc_hidden_dim": 8,
            **SMALL_BACKBONE,
        },
    ),
    "tdmpc": (
        "tdmpc",
        CAMERA,
        {
            "horizon": 3,
            "n_action_repeats": 1,
            "n_action_steps": 2,
            "image_encoder_hidden_dim": 4,
            "state_encoder_hidden_dim": 8,
            "latent_dim": 8,
            "q_ensemble_size": 3,
            "mlp_dim": 8,
            "n_gaussian_samples": 16,
            "n_pi_samples": 4,
            "n_elites": 4,
            "cem_iterations": 2,
        },
    ),
    "smolvla": (
        "smolvla",
        TOP,
        {
            **FLOW,
            "num_steps": 3,
            "resize_imgs_with_padding": (32, 32),
            "num_vlm_layers": 2,
            "num_expert_layers": 2,
            "load_vlm_weights": False,
        },
    ),
    "pi0": ("pi0", TOP, {**FLOW, "num_inference_steps": 3, "image_resolution": (32, 32), "dtype": "float32"}),
    "pi05": ("pi05", TOP, {**FLOW, "num_inference_steps": 3, "image_resolution": (32, 32), "dtype": "float32"}),
    "multi_task_dit": (
        "multi_task_dit",
        TOP,
        {
            "horizon": 8,
            "n_action_steps": 4,
            "hidden_dim": 16,
            "num_layers": 1,
            "num_heads": 2,
            "timestep_embed_dim": 8,
            "num_train_timesteps": 10,
            "num_inference_steps": 3,
            "prediction_type": "sample",  # with epsilon and clipping, random weights give nothing but -1 and 1
            "clip_sample": False,
            "image_crop_shape": None,
            "tokenizer_max_length": 16,
        },
    ),
    "gaussian_actor": (
        "gaussian_actor",
        {"observation.state": STATE},
        {"latent_dim": 8, "state_encoder_hidden_dim": 8},
    ),
}


def statistics(features: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    import torch

    generator, made = torch.Generator().manual_seed(3), {}
    for name, feature in features.items():
        shape = (3, 1, 1) if feature.type.value == "VISUAL" else feature.shape
        low, high = (sign * (1 + torch.rand(shape, generator=generator)) for sign in (-1, 1))
        spread = {"mean": torch.randn(shape, generator=generator) * 0.1, "std": high / 2}
        made[name] = {**spread, "min": low, "max": high, "q01": low, "q99": high}
    return made


def save(folder: Path, kind: str, inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """A policy of random weights with its processors, as LeRobot's training saves them."""
    import torch
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies import get_policy_class, make_policy_config, make_pre_post_processors

    features = {name: PolicyFeature(FeatureType(kind_), shape) for name, (kind_, shape) in inputs.items()}
    action = {"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))}
    config = make_policy_config(kind, input_features=features, output_features=action, device="cpu", **settings)
    torch.manual_seed(0)
    policy = get_policy_class(kind)(config)
    with torch.no_grad():
        for parameter in policy.parameters():
            if bool((parameter == parameter.flatten()[0]).all()):  # what begins as ones or zeros would do nothing
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    if kind == "vqbet":  # as after the first phase of its training
        policy.vqbet.action_head.vqvae_model.discretized.fill_(True)
    policy.save_pretrained(folder)
    for processors in make_pre_post_processors(config, dataset_stats=statistics({**features, **action})):
        processors.save_pretrained(folder)


def tokenizer_of_bytes() -> tuple[Any, int]:
    """A tokenizer that knows the tokens a VLM asks for and single bytes, and how many it knows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"image": "<image>", "fake_image": "<fake>", "global_image": "<global>", "end_of_utterance": "<end>"}
    words = ["<pad>", "<bos>", "<eos>", *special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    named = {f"{name}_token": token for name, token in special.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", extra_special_tokens=named
    )
    return tokenizer, len(words)


def save_vlm(folder: Path) -> None:
    """A SmolVLM as transformers saves one, without weights: configuration, tokenizer, image and video processors."""
    from transformers import SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    tokenizer, words = tokenizer_of_bytes()
    heads = {"num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 48}
    text = {"model_type": "llama", "vocab_size": words, "num_hidden_layers": 2, "num_key_value_heads": 1, **heads}
    vision = {"image_size": 32, "patch_size": 8, "num_hidden_layers": 1, **heads}
    config = {"text_config": {**text, "head_dim": 16, "pad_token_id": 0}, "vision_config": vision}
    SmolVLMConfig(**config, scale_factor=2, image_token_id=3, pad_token_id=0).save_pretrained(folder)
    size = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 32}}
    sampling = {"fps": 1, "max_frames": 1, "video_size": {"longest_edge": 32}}
    SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(**size),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(**size, video_sampling=sampling),
        image_seq_len=4,
    ).save_pretrained(folder)


def save_clip(folder: Path) -> None:
    """A CLIP of random weights with its tokenizer."""
    import torch
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    tokenizer, words = tokenizer_of_bytes()
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = {**size, **ends, "vocab_size": words, "max_position_embeddings": 32}
    vision = {**size, "image_size": 32, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def small_pi0(tokenizer: Path) -> Iterator[None]:
    """LeRobot's pi0 and pi05 with Gemmas of two small layers: no configuration can change that theirs are variants of
    0.3 and 2 billion parameters, with a vision tower of 0.4 and a vocabulary of 257,152, and that their tokenizer is a
    gated one of the hub."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("pi0", "pi05"):
            _shrink(patch, f"lerobot.policies.{name}", name, tokenizer)
        yield


def _shrink(patch: pytest.MonkeyPatch, package: str, name: str, tokenizer: Path) -> None:
    modeling = import_module(f"{package}.modeling_{name}")
    processor = import_module(f"{package}.processor_{name}")
    vlm, expert = modeling.PaliGemmaForConditionalGenerationWithPiGemma, modeling.PiGemmaForCausalLM
    step = processor.TokenizerProcessorStep
    gemma = modeling.GemmaConfig(width=32, depth=2, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=16)

    def small_vlm(config: Any) -> Any:
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        for setting, value in {**vision, "patch_size": 8, "projection_dim": 32}.items():
            setattr(config.vision_config, setting, value)
        config.text_config.vocab_size = 300
        return vlm(config)

    def small_expert(config: Any) -> Any:
        config.vocab_size = 300
        return expert(config)

    patch.setattr(modeling, "get_gemma_config", lambda variant: gemma)
    patch.setattr(modeling, "PaliGemmaForConditionalGenerationWithPiGemma", small_vlm)
    patch.setattr(modeling, "PiGemmaForCausalLM", small_expert)
    patch.setattr(processor, "TokenizerProcessorStep", lambda **o: step(**{**o, "tokenizer_name": str(tokenizer)}))


@pytest.fixture(scope="session")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vlm")
    save_vlm(folder)
    return folder


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    save_clip(folder)
    return folder


@pytest.fixture
def small_gemma(vlm: Path) -> Iterator[None]:
    with small_pi0(vlm):
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Checkpoints:
    """``checkpoints("act")``: the folder of that kind; with settings, of one that is different in them."""
    root = tmp_path_factory.mktemp("lerobot")
    made: dict[str, Path] = {}

    def make(kind: str, **changed: Any) -> Path:
        name = "-".join([kind, *(f"{k}={v}" for k, v in sorted(changed.items()))])
        if name not in made:
            type_, inputs, settings = KINDS[kind]
            settings = {**settings, **changed}
            if kind == "smolvla":
                settings["vlm_model_name"] = str(request.getfixturevalue("vlm"))
            if kind == "multi_task_dit":
                clip = str(request.getfixturevalue("clip"))
                settings |= {"vision_encoder_name": clip, "text_encoder_name": clip}
            with small_pi0(request.getfixturevalue("vlm")) if kind in ("pi0", "pi05") else nullcontext():
                save(root / name, type_, inputs, settings)
            made[name] = root / name
        return made[name]

    return make
