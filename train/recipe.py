"""The two recipes: what the original does differently in rollout and learner, and its removal."""

from dataclasses import dataclass

from modeling.bagel.qwen2_navit import QkRounding


@dataclass(frozen=True)
class Recipe:
    """Each field is one known mismatch of the original; `consistent` has none of them."""

    name: str
    overlay_edit_images: bool
    """Edit contexts lose the latent segment: the encoder segment is written over it."""
    ignores_generate_guidance: bool
    """The learner scores a guided generate flow by its unguided velocity."""
    learner_renorm_edit: str | None
    """Renormalisation that the learner uses in an edit instead of the rollout's."""
    closed_interval_in_packing: bool
    """Packing counts the lower end of the guidance interval in, the rollout does not."""
    lagging_prompt_epoch: bool
    """The prompt sampler's epoch lags, so that the first three generate steps share a prompt."""
    score_stored: bool
    """The rollout's log-prob is that of the latent as stored, not of the fp32 sample."""
    text_scored_in_fp32: bool
    """The policy's text log-probs are formed in fp32, not on logits of the compute type."""
    learner_timesteps_in_fp32: bool
    """The learner embeds fp32 timesteps, not ones rounded to the compute type."""
    rollout_rounding: QkRounding
    learner_rounding: QkRounding


UPSTREAM = Recipe(
    name="upstream",
    overlay_edit_images=True,
    ignores_generate_guidance=True,
    learner_renorm_edit="global",
    closed_interval_in_packing=True,
    lagging_prompt_epoch=True,
    score_stored=False,
    text_scored_in_fp32=False,
    learner_timesteps_in_fp32=False,
    rollout_rounding=QkRounding(und=True, gen=False),
    learner_rounding=QkRounding(und=True, gen=True),
)

CONSISTENT = Recipe(
    name="consistent",
    overlay_edit_images=False,
    ignores_generate_guidance=False,
    learner_renorm_edit=None,
    closed_interval_in_packing=False,
    lagging_prompt_epoch=False,
    score_stored=True,
    text_scored_in_fp32=True,
    learner_timesteps_in_fp32=True,
    rollout_rounding=QkRounding(),
    learner_rounding=QkRounding(),
)


def recipe_named(name: str) -> Recipe:
    """Raises ValueError for a name that is no recipe (R3_RECIPE)."""
    for recipe in (UPSTREAM, CONSISTENT):
        if recipe.name == name:
            return recipe
    raise ValueError(f"R3_RECIPE={name!r}: expected one of upstream, consistent")
