"""All settings of a run in one object, and its ways in: command line, environment, Python."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modeling.bagel.guidance import GuidanceConfig
from modeling.bagel.sampling import SamplingConfig
from modeling.bagel.switches import Switches, process_environment, read_switches
from modeling.diffusion.sde_sampler import SdeConfig
from train.flags import (
    ConfigError,
    Flag,
    check_value,
    collect_flags,
    convert,
    did_you_mean,
    parse_flags,
)
from train.settings import (
    EvaluationConfig,
    FlowConfig,
    ImageConfig,
    OptimizerConfig,
    PathConfig,
    ProcessConfig,
    ReportConfig,
    RewardSettings,
    RlConfig,
    ScheduleConfig,
    SeedConfig,
    TextConfig,
)


@dataclass(frozen=True)
class TrainConfig:
    """The settings of one run. A flag --x of group g is `config.g.x`; --r3_x is a switch."""

    paths: PathConfig = PathConfig()
    processes: ProcessConfig = ProcessConfig()
    rewards: RewardSettings = RewardSettings()
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    rl: RlConfig = RlConfig()
    text: TextConfig = TextConfig()
    flow: FlowConfig = FlowConfig()
    images: ImageConfig = ImageConfig()
    seeds: SeedConfig = SeedConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    report: ReportConfig = ReportConfig()
    switches: Switches = Switches()

    @property
    def samples_per_rank(self) -> int:
        """Samples that one rank draws for a prompt."""
        return self.rl.group_size // self.rl.policy_group_size

    @property
    def wandb_name(self) -> str:
        """The name that wandb shows."""
        return self.paths.wandb_name or self.paths.exp_name

    @property
    def sampling_gen(self) -> SamplingConfig:
        """How tokens are drawn in a generate step."""
        return self._sampling(self.text.text_temperature)

    @property
    def sampling_edit(self) -> SamplingConfig:
        """How tokens are drawn in a refine step."""
        return self._sampling(self.text.text_temperature)

    @property
    def sampling_eval(self) -> SamplingConfig:
        """How tokens are drawn in an evaluation."""
        return self._sampling(self.evaluation.eval_temperature)

    @property
    def guidance_gen(self) -> GuidanceConfig:
        """Guidance of a drawing: by the text only."""
        return self.flow.guidance(1.0, self.flow.cfg_renorm_type_gen)

    @property
    def guidance_edit(self) -> GuidanceConfig:
        """Guidance of an edit: by the text and by the image."""
        return self.flow.guidance(self.flow.cfg_img_scale, self.flow.cfg_renorm_type_edit)

    @property
    def sde_gen(self) -> SdeConfig:
        """Noise of the stochastic step of a drawing."""
        return SdeConfig(self.flow.constant_eta_gen, self.flow.eta_mode)

    @property
    def sde_edit(self) -> SdeConfig:
        """Noise of the stochastic step of an edit."""
        return SdeConfig(self.flow.constant_eta_edit, self.flow.eta_mode)

    def to_flags(self) -> dict[str, object]:
        """Every flag and its value, secrets included."""
        return {
            name: getattr(getattr(self, entry.group), entry.attribute)
            for name, entry in FLAGS.items()
        }

    def replace(self, **flags: object) -> "TrainConfig":
        """A copy with these flags changed. Raises ConfigError as `from_flags` does."""
        return from_flags({**self.to_flags(), **flags})

    def _sampling(self, temperature: float) -> SamplingConfig:
        return SamplingConfig(self.text.do_sample, temperature, self.text.top_k, self.text.top_p)


FLAGS: dict[str, Flag] = collect_flags(TrainConfig)


def from_flags(flags: Mapping[str, object]) -> TrainConfig:
    """A config of these flags (Python values or text) and defaults; no environment is read.

    Raises ConfigError for an unknown name or a value that is not allowed, naming the flag.
    """
    groups: dict[str, dict[str, object]] = {}
    switch_texts: dict[str, str] = {}
    for name, value in flags.items():
        if name not in FLAGS:
            raise ConfigError(f"--{name} is no flag{did_you_mean(name, list(FLAGS))}")
        entry = FLAGS[name]
        if entry.group == "switches":
            switch_texts[name.upper()] = str(value)
            continue
        converted = convert(entry, value)
        check_value(entry, converted)
        groups.setdefault(entry.group, {})[entry.attribute] = converted
    try:
        built: dict[str, object] = {"switches": read_switches(switch_texts)}
    except ValueError as error:
        raise ConfigError(str(error)) from error
    classes = {entry.name: entry.type for entry in dataclasses.fields(TrainConfig)}
    built.update({group: classes[group](**values) for group, values in groups.items()})
    return TrainConfig(**built)


def parse_args(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> TrainConfig:
    """The config of a command line. Flags win over R3_* variables and REWARD_API_KEY of `environ`.

    `environ` is the process's environment by default. Raises ConfigError (one line) for an unknown
    flag or switch, a missing value, and a value that is not allowed.
    """
    environ = process_environment() if environ is None else environ
    given = parse_flags(argv, FLAGS, "Trains BAGEL with R3 (reason, reflect, refine).")
    try:
        read_switches(environ)  # refuses unknown R3_* names and bad values
    except ValueError as error:
        raise ConfigError(str(error)) from error
    texts = {name: environ.get(name.upper(), "") for name in _FROM_ENVIRON}
    from_environ = {name: text for name, text in texts.items() if text}
    return from_flags({**from_environ, **given})


_FROM_ENVIRON = {name for name, entry in FLAGS.items() if entry.group == "switches"}
_FROM_ENVIRON.add("reward_api_key")  # a secret: a flag would show it to everyone on the machine
