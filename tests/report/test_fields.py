"""``oarjax config``: the table of fields."""

import pytest

from oarjax.config.schema import Config
from oarjax.credit.registry import described
from oarjax.errors import ConfigError
from oarjax.report.fields import field_rows, markdown, show_fields


def test_every_field_has_a_row_with_its_default_and_accepted_values():
    rows = {row.path: row for row in field_rows()}
    assert rows["run_dir"].default == "required"
    assert rows["rollout.top_p"][1:3] == ("1.0", "number > 0 and <= 1")
    assert rows["rollout.slots"][1:3] == ("null", "integer > 0 or null")
    assert rows["loss.aggregation"][1:3] == ("dapo", "grpo | bnpo | dapo | dr_grpo | luspo")
    assert rows["data.prompt_format"].default == "{prompt}"
    assert rows["sft"][1:3] == ("null", "null or a section")
    assert "oar_g" in rows["credit.method"].accepted
    assert rows["sft.optim.lr"].default == "0.001"  # that of its section, not of every optimizer
    assert [path for path, row in rows.items() if not row.about] == []
    sections = {path.split(".")[0] for path in rows}
    assert sections == set(Config.model_fields)
    assert all(row.accepted != "any value" for row in rows.values()), "a type that the table cannot describe"


def test_a_section_a_field_and_a_wrong_name():
    assert {row.path.split(".")[0] for row in field_rows("rollout")} == {"rollout"}
    assert [row.path for row in field_rows("credit.gate.tau")] == ["credit.gate.tau"]
    with pytest.raises(ConfigError, match=r"'optim.learning_rate'; did you mean optim.lr\?"):
        field_rows("optim.learning_rate")
    with pytest.raises(ConfigError, match=r"no section or field 'rolout'; did you mean rollout\?"):
        field_rows("rolout")


def test_methods_of_credit_are_explained_below_their_field(capsys):
    show_fields("credit.method", as_json=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {about}" in shown for name, about in described().items())
    assert "custom the method that credit.function names" in shown
    show_fields("optim", as_json=False)
    assert "what it does" not in capsys.readouterr().out


def test_the_markdown_table_escapes_what_would_split_a_cell():
    page = markdown(field_rows("loss.aggregation"))
    assert page.splitlines()[2].startswith(r"| `loss.aggregation` | `dapo` | grpo \| bnpo \| dapo")
