"""The groups of settings of a run, as frozen dataclasses; every field is a flag of its name."""

from dataclasses import dataclass
from pathlib import Path

from modeling.bagel.guidance import RENORM_TYPES, GuidanceConfig
from modeling.bagel.images import ImageTransform
from modeling.diffusion.sde_sampler import ETA_MODES
from train.flags import flag
from train.rewards import OUTAGE_POLICIES, REWARD_KINDS, RewardConfig

VAE_STRIDE = 16  # pixels along one side of a latent token


@dataclass(frozen=True)
class PathConfig:
    """Where things are read and written."""

    model_path: str = flag("", "folder of the BAGEL checkpoint (required)")
    log_dir: str = flag("./output", "outputs go to LOG_DIR/WANDB_PROJECT/EXP_NAME")
    train_data_path: str = flag("data/rl_train/train_geneval.jsonl", "training prompts (JSONL)")
    val_data_path: str = flag("data/rl_test/test_geneval.jsonl", "evaluation prompts (JSONL)")
    dataset_name: str = flag("geneval", "format of the prompt files", choices=("geneval",))
    exp_name: str = flag("faster_r3", "name of the run and of its folder")
    wandb_project: str = flag("R3", "wandb project, and the folder above the run's")
    wandb_name: str = flag("", "name shown by wandb; empty takes EXP_NAME")
    resume_from: str = flag("", "checkpoint folder to start from; empty starts from MODEL_PATH")
    auto_resume: bool = flag(
        False, "go on from the newest checkpoint of the run's own folder, before RESUME_FROM"
    )

    @property
    def run_dir(self) -> Path:
        """The run's folder, `LOG_DIR/WANDB_PROJECT/EXP_NAME`."""
        return Path(self.log_dir) / self.wandb_project / self.exp_name


@dataclass(frozen=True)
class ProcessConfig:
    """Processes, devices and number formats."""

    nnodes: int | None = flag(None, "machines; checked against torchrun when given", minimum=1)
    node_rank: int | None = flag(
        None, "number of this machine; checked against torchrun when given", minimum=0
    )
    nproc_per_node: int | None = flag(
        None, "ranks a machine; checked against torchrun when given", minimum=1
    )
    master_addr: str = flag("localhost", "host of the rendezvous when torchrun sets none")
    master_port: int | None = flag(
        None,
        "port of the rendezvous when torchrun sets none; empty takes a free one",
        minimum=1,
        maximum=65535,
    )
    num_shard: int = flag(
        8, "ranks that share one copy of the weights; a larger world replicates (HSDP)", minimum=1
    )
    device: str = flag("auto", "auto takes a GPU if there is one", choices=("auto", "cpu", "cuda"))
    precision: str = flag(
        "auto",
        "compute type; auto is bf16 on a GPU and fp32 on a CPU",
        choices=("auto", "bf16", "fp32"),
    )
    activation_checkpointing: bool = flag(True, "recompute a layer's activations in the backward")
    process_group_timeout_s: float = flag(
        1800.0, "seconds that a collective waits for the other ranks", above=0
    )

    def precision_on(self, device_type: str) -> str:
        """The compute type, bf16 or fp32, on a device of this type."""
        if self.precision == "auto":
            return "bf16" if device_type == "cuda" else "fp32"
        return self.precision


@dataclass(frozen=True)
class RewardSettings:
    """The reward service and how long to wait for it."""

    reward_url: str = flag("http://127.0.0.1:18085", "reward server, commas between several")
    reward_fn: str = flag(
        "geneval", "kind of reward", choices=REWARD_KINDS
    )
    reward_api_key: str = flag(
        "", "key of the chat endpoint; give it as the variable REWARD_API_KEY, ps shows flags"
    )
    reward_model_name: str = flag("", "model of the chat endpoint (geneval_plus, tiif)")
    format_reward_weight: float = flag(1.0, "weight of the format reward", minimum=0)
    reward_outage: str = flag(
        "abort",
        "when no server answers: wait, skip the samples, or abort after the step deadline",
        choices=OUTAGE_POLICIES,
    )
    reward_request_timeout_s: float = flag(120.0, "seconds for one request", above=0)
    reward_step_deadline_s: float = flag(
        480.0, "seconds for all rewards of a step; less than the process group's timeout", above=0
    )

    def client_config(self) -> RewardConfig:
        """What the reward client takes. Raises ValueError for an address or key it cannot use."""
        return RewardConfig(
            urls=tuple(url.strip() for url in self.reward_url.split(",") if url.strip()),
            kind=self.reward_fn,
            api_key=self.reward_api_key,
            model_name=self.reward_model_name,
            request_timeout_s=self.reward_request_timeout_s,
            step_deadline_s=self.reward_step_deadline_s,
            outage=self.reward_outage,
        )


@dataclass(frozen=True)
class ScheduleConfig:
    """How long a run is and what happens when. TOTAL_STEPS is part of the random seeds."""

    total_steps: int = flag(1000, "RL steps of the run", minimum=1, maximum=10**9)
    save_every: int = flag(50, "steps between checkpoints; 0 saves none", minimum=0)
    keep_checkpoints: int = flag(0, "keep only the newest this many; 0 keeps all", minimum=0)
    eval_freq: int = flag(50, "steps between evaluations; 0 evaluates never", minimum=0)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a linear warm-up (the first step runs at 0) and a constant rate after it."""

    lr: float = flag(5e-6, "learning rate", minimum=0)
    warmup_steps: int = flag(10, "steps of the linear warm-up", minimum=0)
    beta1: float = flag(0.9, "decay of the first moment", minimum=0, below=1)
    beta2: float = flag(0.95, "decay of the second moment", minimum=0, below=1)
    eps: float = flag(1e-8, "added to the root of the second moment", above=0)
    weight_decay: float = flag(0.0, "decoupled weight decay", minimum=0)
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm", above=0)


@dataclass(frozen=True)
class RlConfig:
    """Groups, losses and what is trained."""

    rounds: int = flag(2, "period of the alternation; only 2 has a meaning", minimum=2, maximum=2)
    group_size: int = flag(16, "samples of one prompt", minimum=2)
    policy_group_size: int = flag(4, "ranks that share a prompt", minimum=1)
    ce_weight: float = flag(1.0, "weight of the text loss", minimum=0)
    mse_weight: float = flag(2.0, "weight of the image loss", minimum=0)
    kl_weight_text: float = flag(0.001, "weight of the text KL to the reference", minimum=0)
    kl_weight_image: float = flag(0.001, "weight of the image KL to the reference", minimum=0)
    kl_limit: float = flag(10.0, "a text KL above this is left out of the loss", above=0)
    grpo_clip_ratio: float = flag(0.2, "ratios are clipped to 1 +- this", above=0, below=1)
    perfect_probability: float = flag(
        0.15, "chance that a refine step takes a picture of score 1", minimum=0, maximum=1
    )
    tune_text_cot: bool = flag(True, "train the thoughts")
    tune_image_cot: bool = flag(True, "train the pictures")
    freeze_vit: bool = flag(True, "keep the image encoder fixed; only True is supported")
    freeze_und: bool = flag(False, "keep the understanding expert fixed")


@dataclass(frozen=True)
class TextConfig:
    """Text decoding in the rollout."""

    think_mode: bool = flag(True, "think before drawing; False draws from the prompt alone")
    do_sample: bool = flag(True, "draw tokens; False takes the most likely one")
    max_output_token_n_gen: int = flag(196, "tokens of a thought at most (generate)", minimum=2)
    max_output_token_n_edit: int = flag(384, "tokens of a reflection at most (edit)", minimum=2)
    text_temperature: float = flag(0.9, "sampling temperature", above=0)
    top_k: int = flag(50, "used when TOP_P is 1; 0 or -1 has no limit", minimum=-1)
    top_p: float = flag(0.9, "probability mass to draw from; 1 switches it off", above=0, maximum=1)


@dataclass(frozen=True)
class FlowConfig:
    """The image flow: points, guidance and the stochastic step."""

    num_timesteps_gen: int = flag(16, "points of the flow (generate)", minimum=2)
    num_timesteps_edit: int = flag(21, "points of the flow (edit)", minimum=2)
    timestep_shift: float = flag(3.0, "shift of the schedule towards noise", above=0)
    eta_mode: str = flag("monotonic", "noise of the stochastic step over time", choices=ETA_MODES)
    constant_eta_gen: float = flag(0.7, "noise level (generate)", above=0)
    constant_eta_edit: float = flag(1.0, "noise level (edit)", above=0)
    enable_sde_gen: bool = flag(True, "take a stochastic step and train it (generate)")
    enable_sde_edit: bool = flag(True, "take a stochastic step and train it (edit)")
    max_sde_timestep_idx_for_edit: int = flag(
        2, "the stochastic step of an edit is one of the first this many", minimum=1
    )
    cfg_text_scale: float = flag(4.0, "guidance by the text; at most 1 is off", minimum=0)
    cfg_img_scale: float = flag(1.5, "guidance by the image (edit); at most 1 is off", minimum=0)
    cfg_interval_low: float = flag(0.4, "guidance is on above this time", minimum=0, maximum=1)
    cfg_interval_high: float = flag(1.0, "guidance is on up to this time", minimum=0, maximum=1)
    cfg_renorm_min: float = flag(0.0, "smallest scale of the renorm", minimum=0, maximum=1)
    cfg_renorm_type_gen: str = flag("global", "renorm (generate)", choices=RENORM_TYPES)
    cfg_renorm_type_edit: str = flag("text_channel", "renorm (edit)", choices=RENORM_TYPES)

    def guidance(self, image_scale: float, renorm_type: str) -> GuidanceConfig:
        """Guidance with the scales and times of this run."""
        return GuidanceConfig(
            text_scale=self.cfg_text_scale,
            image_scale=image_scale,
            interval=(self.cfg_interval_low, self.cfg_interval_high),
            renorm_type=renorm_type,
            renorm_min=self.cfg_renorm_min,
        )


@dataclass(frozen=True)
class ImageConfig:
    """Sizes of pictures, in pixels."""

    image_size: int = flag(512, "side of a drawn picture, a multiple of 16", minimum=16)
    vae_max_image_size: int = flag(512, "longest side that the VAE sees", minimum=16)
    vae_min_image_size: int = flag(256, "shortest side that the VAE sees", minimum=16)
    vit_max_image_size: int = flag(504, "longest side that the ViT sees", minimum=14)
    vit_min_image_size: int = flag(252, "shortest side that the ViT sees", minimum=14)

    @property
    def vae_transform(self) -> ImageTransform:
        """How a picture is resized for the VAE."""
        return ImageTransform(self.vae_max_image_size, self.vae_min_image_size, VAE_STRIDE)

    def vit_transform(self, patch_size: int) -> ImageTransform:
        """How a picture is resized for a ViT of this patch size."""
        return ImageTransform(self.vit_max_image_size, self.vit_min_image_size, patch_size)


@dataclass(frozen=True)
class SeedConfig:
    """Seeds of the random streams."""

    global_seed: int = flag(4396, "seed of the flow noise", minimum=0, maximum=2**32 - 1)
    data_seed: int = flag(42, "seed of the prompt order", minimum=0, maximum=2**32 - 1)


@dataclass(frozen=True)
class EvaluationConfig:
    """The evaluation loop: draw once, then refine."""

    eval_num_rounds: int = flag(4, "rounds: one drawing, then refinements", minimum=1)
    eval_num_timesteps: int = flag(50, "points of the flow", minimum=2)
    eval_temperature: float = flag(0.3, "sampling temperature", above=0)
    eval_batch_size: int = flag(16, "prompts of a rank drawn at once", minimum=1)
    eval_prompts: int = flag(0, "use only the first this many prompts; 0 uses all", minimum=0)


@dataclass(frozen=True)
class ReportConfig:
    """What a person sees."""

    rollout_vis_step: int = flag(10, "steps between rollout reports; 0 writes none", minimum=0)
    log_level: str = flag(
        "info", "what the log shows", choices=("debug", "info", "warning", "error")
    )
