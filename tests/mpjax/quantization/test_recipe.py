from __future__ import annotations

import dataclasses
import re
import tomllib

import pytest

from mpjax.kernels import KVFormat, WeightFormat
from mpjax.quantization.learning.descent import Learning
from mpjax.quantization.recipe import Recipe, Rule

TEXT = """
precision = "W4A16KV8"
method = "awq+gptq"

[[rules]]
modules = "layers.*.mlp.down"
precision = "W8A16KV16"

[[rules]]
modules = "layers.0.*"
method = "range"

[[rules]]
modules = "layers.1.*"
precision = "W16A16KV16"
"""


@pytest.fixture
def write(tmp_path):
    def to_file(text):
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return path

    return to_file


def test_the_first_rule_that_matches_counts(write):
    recipe = Recipe.read(write(TEXT))
    assert recipe.kv == KVFormat.parse("KV8")
    found = {
        path: (str(rule.weights), str(rule.method))
        for path in (
            "layers.0.mlp.down",
            "layers.0.attention.qkv",
            "layers.1.mlp.gate_up",
            "layers.7.mlp.gate_up",
        )
        for rule in [recipe.rule_of(path)]
    }
    assert found == {
        "layers.0.mlp.down": ("uint8:g128", "awq+gptq"),
        "layers.0.attention.qkv": ("uint4:g128", "range"),
        "layers.1.mlp.gate_up": ("bfloat16", "awq+gptq"),
        "layers.7.mlp.gate_up": ("uint4:g128", "awq+gptq"),
    }


def test_a_recipe_says_how_scales_are_learned():
    content = {"precision": "WNF3A16KV16", "method": "gptq+learn"}
    assert Recipe.parse(content).learning == Learning()
    found = Recipe.parse(content | {"learning": {"epochs": 3, "rate": 0.5, "table": True}})
    assert found.learning == Learning(3, 0.5, True)
    assert Recipe.parse(tomllib.loads(found.to_toml())) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the recipe has no precision"),
        (
            'precision = "W4A16KV8"\nmethods = "awq"',
            "has a key 'methods': expected learning, method,",
        ),
        ('precision = "A16KV8"', "does not say what weights become"),
        ('precision = "W5A16KV8"', "W5A16 is not implemented"),
        ('precision = "W4A16KV8"\nmethod = "gtpq"', "did you mean 'gptq'"),
        ('precision = "W4A16KV8"\nmethod = 4', "the method is 4: expected a text"),
        (
            'precision = "W4A16KV8"\n[[rules]]\nmodules = "a"\nprecision = "W4A32KV8"',
            "the recipe computes in 16 bits",
        ),
        ('precision = "W4A16KV8"\nrules = 3', "rules is 3: expected a list"),
        ('precision = "W4A16KV8"\n[[rules]]\nprecision = "W8A16KV16"', "a rule has no modules"),
        ('precision = "W4A16KV8"\n[[rules]]\nmodules = "a"', "and a precision or method"),
        ('precision = "W4A16KV8"\nrules = [3]', "a rule is 3: expected a table"),
        ('precision = "W4A16KV8"\nlearning = 3', "learning is 3: expected a table, [learning]"),
        (
            'precision = "W4A16KV8"\n[learning]\nrates = 3',
            "key 'rates': expected epochs, rate",
        ),
        ('precision = "W4A16KV8"\n[learning]\nrate = 3', "rate is 3: expected more than 0"),
        ("precision = ", "Invalid value"),
        (
            "# mine\nprecision = W4A16KV8  # usual",
            'line 2 has a text without quotes: write precision = "W4A16KV8"',
        ),
        (
            'precision = "W4A16KV8"\n[[rules]]\n modules = layers.0.*\nmethod = "rtn"',
            'line 3 has a text without quotes: write modules = "layers.0.*"',
        ),
        ('precision = "W4A16KV8"\n[[rules]]\nmodules = []\nmethod = "rtn"', "the rule for []: exp"),
        ('precision = "W4A16KV8"\n[[rules]]\nmodules = [3]\nmethod = "rtn"', "expected a pattern"),
        (
            'precision = "W4A16KV8"\n[[rules]]\nmodules = "a"\nprecision = "W8A16KV16H8"',
            "put H and E into the precision at the top",
        ),
    ],
)
def test_faults_are_named_with_the_file(write, text, message):
    path = write(text)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        Recipe.read(path)
    assert str(path) in str(error.value)


PATHS = [f"layers.{number}.{path}" for number in range(3) for path in ("attention.qkv", "mlp.down")]


def test_lists_of_patterns_and_layers_from_the_last(write):
    text = """
        precision = "W4A16KV8"
        [[rules]]
        modules = ["layers.0.*", "layers.-1.*", "layers.*.mlp.down"]
        precision = "W8A16KV8"
        """
    recipe = Recipe.read(write(text)).of_model((), 3)
    recipe.require_used(PATHS)
    wide = [path for path in PATHS if recipe.rule_of(path).weights.bits == 8]
    assert wide == [path for path in PATHS if path != "layers.1.attention.qkv"]
    assert recipe.of_model((), 3) == recipe
    far = Recipe.read(write(text.replace("-1", "-4"))).of_model((), 3)
    with pytest.raises(ValueError, match=r"the rule for 'layers\.-4\.\*' matches no linear map"):
        far.require_used(PATHS)


@pytest.mark.parametrize("precision", ["W4A16KV8", "W4A16KV4cH16", "W8A8KV8H8E8", "W4g32A32KV16E4"])
@pytest.mark.parametrize("method", ["gptq", "rotate+hadamard+os+rtn"])
def test_recipes_are_written_and_read(precision, method, write):
    recipe = Recipe.of(precision, method)
    first = [Rule(path, "table3:g64", "awq+gptq") for path in ("layers.0.*", "layers.-1.*")]
    rules = (*first, Rule("*.mlp.down", "float8:g128", "rtn"), *recipe.rules)
    for written in (recipe, dataclasses.replace(recipe, rules=rules)):
        if written.bits == 16:
            assert Recipe.read(write(written.to_toml())) == written
    with pytest.raises(ValueError, match=r"the last rule is for '\*\.mlp\.down': expected one for"):
        dataclasses.replace(recipe, rules=rules[:3]).to_toml()


def test_the_head_has_8_bits_by_default():
    eight = WeightFormat("uint8", None, symmetric=True)
    assert Recipe.of("W4A16KV8").tables == {"head": eight}
    assert Recipe.of("W16A16KV8").tables == {}
    assert Recipe.of("W4A16KV8E8").tables == {"embedding": eight}
    assert Recipe.of("W4A16KV8H16").tables == {"head": WeightFormat("bfloat16")}
    assert Recipe((), head="uint8:gK:sym").head == eight


def test_a_rule_that_others_hide_is_named():
    rules = [
        {"modules": "layers.*.mlp.*", "method": "rtn"},
        {"modules": "layers.1.mlp.down", "method": "gptq"},
    ]
    hidden = Recipe.parse({"precision": "W4A16KV8", "rules": rules})
    with pytest.raises(
        ValueError, match=r"'layers\.1\.mlp\.down' is never used, because the rules"
    ):
        hidden.require_used(PATHS)
    Recipe.parse({"precision": "W4A16KV8", "rules": rules[::-1]}).require_used(PATHS)
    every = [{"modules": "*", "method": "rtn"}, rules[1]]
    with pytest.raises(ValueError, match="is never used"):
        Recipe.parse({"precision": "W4A16KV8", "rules": every}).require_used(PATHS)
    Recipe.parse({"precision": "W4A16KV8", "rules": every[:1]}).require_used(PATHS)


def test_rules_must_name_every_map_and_match_one():
    rules = Recipe.of("W4A16KV16").rules
    content = {"precision": "W4A16KV8", "rules": [{"modules": "layers.0.*", "method": "rtn"}]}
    partial = Recipe(Recipe.parse(content).rules[:1])
    with pytest.raises(ValueError, match=r"no rule of the recipe names layers\.1\.mlp\.down"):
        partial.rule_of("layers.1.mlp.down")
    partial.require_used(["layers.0.mlp.down"])
    Recipe(rules).require_used(["layers.0.mlp.down"])
    with pytest.raises(ValueError, match=r"'layers\.0\.\*' matches no linear map .* mlp\.down"):
        partial.require_used(["layers.1.mlp.down"])


def test_the_blocks_of_activations_come_from_the_precision():
    content = {"precision": "W4Ax16KV4", "method": "rtn"}
    rules = [{"modules": "*.down", "precision": "W4A4KV4"}, {"modules": "*.qkv", "method": "range"}]
    recipe = Recipe.parse(content | {"rules": rules})
    assert [rule.blocks.one_in for rule in recipe.rules] == [0, 16, 16]
    assert [rule.needs_text for rule in recipe.rules] == [False, True, True]
    within = recipe.with_activation_error(0.01)
    assert {rule.blocks.error for rule in within.rules} == {0.01}
    assert all(rule.needs_text for rule in within.rules)
    with pytest.raises(ValueError, match="for W4Ax alone"):
        Recipe.of("W4A16KV4", "rtn").with_activation_error(0.01)
