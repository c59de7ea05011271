"""Records: what is valid, and that a reader never sees a part of one."""

from __future__ import annotations

import copy
import json

import fixture_records as fixture
import jsonschema
import pytest

from stratbench.cell import record
from stratbench.cell.coordinates import Cell


@pytest.fixture
def good() -> dict:
    return fixture.make_record(Cell("demo", "digits", "ddp", "resnet-compact", "digits", 2, 0))


def test_a_record_is_read_as_it_was_written(tmp_path, good):
    record.write_record(tmp_path / "deep" / "record.json", good)
    assert record.read_record(tmp_path / "deep" / "record.json") == good
    assert record.get_cell(good) == Cell("demo", "digits", "ddp", "resnet-compact", "digits", 2, 0)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda r: r.pop("time"), "top level"),
        (lambda r: r.update(status="error"), "status"),
        (lambda r: r.update(extra=1), "top level"),
        (lambda r: r["cell"].update(gpus=0), "cell.gpus"),
        (lambda r: r["time"].update(train_time_s="1"), "time.train_time_s"),
        (lambda r: r["time"].update(total_s=-7187.0), "time.total_s"),
        (lambda r: r["score"].update(final="x"), "score.final"),
        (lambda r: r["workers"][0].pop("rank"), "workers.0"),
        (lambda r: r["settings"].pop("lr"), "settings"),
        (
            lambda r: r["settings"].update(gradient_accumulation_steps=0),
            "settings.gradient_accumulation_steps",
        ),
        (lambda r: r["settings"].update(schedule="step"), "settings.schedule"),
    ],
)
def test_a_wrong_record_is_refused_with_file_and_field(tmp_path, good, change, place):
    bad = copy.deepcopy(good)
    change(bad)
    path = tmp_path / "record.json"
    with pytest.raises(record.RecordError) as refused:
        record.write_record(path, bad)
    assert str(path) in str(refused.value)
    assert f"{place}: " in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    path.write_text(json.dumps(bad))
    with pytest.raises(record.RecordError):
        record.read_record(path)


def test_details_are_compiled_for_a_fault_alone(good):
    """Each process that reads or writes a record waits for what it compiles."""
    record.compile_record_validator.cache_clear()
    record.validate_record(good)
    assert record.compile_record_validator.cache_info().currsize == 1
    with pytest.raises(record.RecordError):
        record.validate_record(good | {"status": "error"})
    assert record.compile_record_validator.cache_info().currsize == 2


@pytest.mark.slow
def test_records_are_judged_as_jsonschema_judges_them(good):
    """Every field with every kind of value, and left out, and one too many; of a list the first item's."""
    schema = record.load_schema()
    full = jsonschema.Draft202012Validator(schema)
    # No rule looks at two parts of a record: a change within one part is judged by the rules of this part.
    simple = {"type", "required", "properties", "additionalProperties"}
    assert schema.keys() <= simple | {"$schema", "title", "description"}
    parts = {k: jsonschema.Draft202012Validator(rule) for k, rule in schema["properties"].items()}
    agreed = {True: 0, False: 0}

    def is_valid() -> bool:
        try:
            record.validate_record(good)
        except record.RecordError:
            return False
        return True

    def compare(where: tuple) -> None:
        within = len(where) > 2
        passes = parts[where[0]].is_valid(good[where[0]]) if within else full.is_valid(good)
        assert is_valid() is passes, where
        agreed[passes] += 1

    def walk(inner: dict | list, where: tuple) -> None:
        for key in list(inner) if isinstance(inner, dict) else range(min(1, len(inner))):
            kept = inner[key]
            for other in (None, True, 1, 0, -1, 1.0, 1.5, "", "ok", [], [1], {}, {"a": 1}):
                inner[key] = other
                compare((*where, key, other))
            inner[key] = kept
            if isinstance(kept, dict | list):
                walk(kept, (*where, key))
            if isinstance(inner, dict):
                del inner[key]
                compare((*where, key, "left out"))
                inner[key] = kept
        if isinstance(inner, dict):
            inner["extra"] = 1
            compare((*where, "extra"))
            del inner["extra"]

    compare(())
    walk(good, ())
    assert min(agreed.values()) > 100


@pytest.mark.parametrize("content", [b"", b'{"status": ', b"\xff\xfe"])
def test_what_is_not_json_is_refused_by_name(tmp_path, content):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(record.RecordError, match=r"record\.json is not JSON"):
        record.read_record(path)


def test_a_record_of_an_extension_that_is_not_there_names_it(good):
    good["settings"]["more"] = {"tides": {"tide": 1}}
    with pytest.raises(
        record.RecordError, match=r"settings\.more: needs the extension tides, which is not"
    ):
        record.validate_record(good)


def test_not_a_number_is_never_written(tmp_path, good):
    good["time"]["total_s"] = float("nan")
    with pytest.raises(ValueError, match="JSON compliant"):
        record.write_record(tmp_path / "record.json", good)
    assert list(tmp_path.iterdir()) == []


def test_every_field_of_the_schema_is_described():
    schema = record.load_schema()

    def walk(rule: dict, where: str) -> None:
        for key, inner in rule.get("properties", {}).items():
            assert inner.get("description"), f"{where}.{key}"
            walk(inner, f"{where}.{key}")
        if "items" in rule:
            walk(rule["items"], f"{where}[]")

    walk(schema, "")
