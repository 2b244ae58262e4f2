import pytest

from asyncrl.config import Config
from asyncrl.config.compose import compose, override, to_yaml
from asyncrl.config.effects import RULES
from asyncrl.config.listing import listing
from asyncrl.config.names import option_names, options
from asyncrl.errors import ConfigError, UnsupportedError


def test_there_are_fewer_than_150_options_and_each_says_what_it_means():
    assert len(option_names()) < 150
    assert [name for name, field in options() if not field.description] == []


def test_the_schema_is_the_one_source_of_defaults():
    composed = compose(["task=copy"])
    assert composed == Config()


@pytest.mark.parametrize("recipe", ["tiny", "arithmetic", "chain_sum"])
def test_every_recipe_composes(recipe):
    assert compose([f"recipe={recipe}"]).recipe == recipe


def test_a_group_that_the_user_names_wins_over_the_recipe():
    config = compose(["recipe=arithmetic", "queue=synchronous"])
    assert (config.queue.schedule, config.queue.max_staleness, config.model.path) == ("lockstep", 0, "builtin:smollm2-135m-instruct")


def test_a_single_option_wins_over_all():
    assert compose(["recipe=arithmetic", "queue=synchronous", "queue.max_staleness=3"]).queue.max_staleness == 3


@pytest.mark.parametrize(
    ("override_text", "said"),
    [
        ("recipe=tinny", "arithmetic, chain_sum, tiny"),
        ("queue.max_stalenes=2", "queue.max_staleness"),
        ("steps=3", "launch.steps"),
        ("queue.max_staleness=-1", "queue.max_staleness: .*greater than or equal to 0; met -1"),
        ("queue.max_staleness=abc", "valid integer"),
        ("algorithm.correction_cap=3", "no effect: algorithm.correction is off"),
        ("learner.attention=eager learner.ranks=2 learner.sequence_parallel=2", "no effect: learner.sequence_parallel computes attention"),
        ("+queue.x=1", "name=value"),
        ("queue.window", "name=value"),
    ],
)
def test_a_wrong_override_is_answered_with_the_fix(override_text, said):
    with pytest.raises(ConfigError, match=said):
        compose(override_text.split())


def test_b02_truncated_sampling_is_a_config_error():
    with pytest.raises(UnsupportedError, match="renormalise"):
        compose(["generator.top_p=0.9"])


def test_rules_about_effects_name_real_options():
    assert {rule.option for rule in RULES} <= set(option_names())


def test_override_keeps_the_rest_of_a_stored_configuration():
    config = compose(["recipe=arithmetic"])
    changed = override(config, ["launch.steps=7"])
    assert changed.launch.steps == 7
    assert changed.model_copy(update={"launch": config.launch}) == config


def test_the_listing_has_one_line_for_each_option():
    lines = listing().splitlines()
    assert len(lines) == len(option_names()) + 1
    assert any("queue.max_staleness" in line and ">= 0" in line and "versions" in line for line in lines)
    with pytest.raises(ConfigError, match="no group"):
        listing("kueue")


def test_the_printed_configuration_reads_back():
    import yaml

    config = compose(["recipe=arithmetic"])
    assert Config.model_validate(yaml.safe_load(to_yaml(config))) == config
