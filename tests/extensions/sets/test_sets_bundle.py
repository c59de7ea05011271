"""Bundles: what goes in, what never does, and what a bad one ends in."""

from __future__ import annotations

import getpass
import hashlib
import io
import json
import os
import random
import re
import shutil
import socket
import stat
import struct
import zipfile
from pathlib import Path

import fixture_records as fixture
import pytest

from stratbench.command.__main__ import main as command
from stratbench.extensions.sets import archive
from stratbench.extensions.sets.__main__ import main
from stratbench.extensions.sets.archive import SetError
from stratbench.extensions.sets.bundle import replace_names_in_timeline, write_bundle
from stratbench.extensions.sets.private import (
    LEFT_OUT,
    Replacements,
    expand_node_list,
    remove_secrets,
)
from stratbench.extensions.sets.reading import read_set

SECRET = "hf_abcdefghijklmnopqrstuv"
HOST = "gpu-a07.cluster.example.org"


def named(cell, record):
    """A record as a user's: names of hosts, a home folder, a secret in a variable."""
    for rank, worker in enumerate(record["workers"]):
        said = worker["provenance"]
        said["host"]["name"] = socket.gethostname() if rank % 2 else HOST
        said["environment"] |= {
            "WANDB_API_KEY": SECRET,
            "NCCL_TOPO_FILE": f"{Path.home()}/topo.xml",
            "CUDA_VISIBLE_DEVICES": "GPU-0f0f0f0f-1111-2222-3333-444444444444",
        }
        said["slurm"] = {
            "SLURM_JOB_NODELIST": "gpu-a[07-08]",
            "SLURMD_NODENAME": "gpu-a07",
            "SLURM_CLUSTER_NAME": "secretlab",
        }
    if record["status"] == "oom":
        record["reason"] = f"rank 0 on {HOST} (10.1.2.3:29500) ran out; see /home/alice/x.log"
    return record


@pytest.fixture(scope="module")
def study_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cells = fixture.expand(("ddp", "ps-sync"), ("vgg16",), (1, 2), repeats=2)
    return fixture.write_study(
        tmp_path_factory.mktemp("bundle"),
        cells,
        {("ddp", "vgg16", 1): "oom"},
        change=named,
        timelines=True,
    )


CONFIG = {"study": "constructed", "data": {"root": str(Path.home() / "data"), "token": SECRET}}


@pytest.fixture(scope="module")
def bundled(study_dir: Path) -> bytes:
    return write_bundle(study_dir, CONFIG)[0].read_bytes()


def text_in(content: bytes) -> str:
    with zipfile.ZipFile(io.BytesIO(content)) as z:
        return "\n".join([*z.namelist(), *(z.read(name).decode() for name in z.namelist())])


def refused(path: Path) -> str:
    with pytest.raises(SetError) as error:
        read_set(str(path))
    message = str(error.value)
    assert "\n" not in message
    assert message.isprintable()
    return message


def test_a_bundle_reads_as_the_folder_that_it_was_made_of(study_dir, bundled, tmp_path):
    path = tmp_path / "x.stratbench.zip"
    path.write_bytes(bundled)
    ours, theirs = read_set(str(path)), read_set(str(study_dir))
    assert ours.study == theirs.study == "constructed"
    assert ours.cells.equals(theirs.cells)
    assert len(ours.cells) == 8
    assert ours.epochs.equals(theirs.epochs)
    assert ours.findings.equals(theirs.findings)
    assert ours.config["study"] == "constructed"
    assert ours.provenance["sha256"] == ours.manifest["sha256"]
    assert {"cells.json", "config.json", "environment.json"} < set(ours.manifest["files"])
    assert sum(name.endswith("timeline.csv") for name in ours.manifest["files"]) == 8


def test_a_folder_without_a_list_of_cells_has_all_that_have_a_record(study_dir, tmp_path):
    shutil.copytree(study_dir, tmp_path / "copy")
    (tmp_path / "copy" / "cells.json").unlink()
    assert len(read_set(str(tmp_path / "copy")).records) == len(read_set(str(study_dir)).records)


def test_equal_records_give_equal_bytes(study_dir, bundled):
    assert write_bundle(study_dir, CONFIG)[0].read_bytes() == bundled


@pytest.mark.parametrize("hosts", ["named", "replaced"])
def test_no_secret_is_in_a_bundle(study_dir, tmp_path, hosts):
    out, _ = write_bundle(study_dir, CONFIG, hosts, tmp_path / "x.zip")
    assert SECRET not in text_in(out.read_bytes())
    assert "WANDB" not in text_in(out.read_bytes())


def test_an_experiment_called_as_a_part_of_a_record_keeps_its_config(study_dir, tmp_path):
    config = {"experiments": {"slurm": {"epochs": 3}, "environment": {"lr": 0.1}}}
    path, _ = write_bundle(study_dir, config, "replaced", tmp_path / "x.stratbench.zip")
    assert read_set(str(path)).config == config


@pytest.mark.parametrize(
    "secret",
    [
        {"tokens": ["abcdefgh"]},
        {"token": ["abc"]},
        {"password": {"value": "x"}},
        {"api_keys": {"a": "k1"}},
        {"secret": 123456},
        {"credentials": {"user": "me", "pin": [1, 2]}},
        {"hubAuth": {"a": {"b": "c"}}},
        {"key": {"mine": ["abc"]}},
        {"PASSPHRASE": 1.5},
        {"url": "https://store.example.org/x?X-Amz-Expires=9&X-Amz-Signature=0a1b2c"},
        {"url": "https://d1.example.org/x?Expires=1&Signature=a~b&Key-Pair-Id=APK"},
        {"url": "https://blob.example.org/x?sv=2022&sig=a%2Fb"},
        {"url": "see https://example.org/x?access_token=abc for more"},
        {"url": "https://example.org/x?size=3&api-key=abc"},
    ],
)
def test_a_secret_of_any_shape_is_left_out(secret):
    """In a user's arguments, which configs and records carry alike."""
    for is_record in (False, True):
        found = remove_secrets({"kwargs": {"size": 3, "deep": [secret]}}, is_record)
        assert found["kwargs"]["size"] == 3
        [left] = found["kwargs"]["deep"]
        assert set(leaves(left)) == {LEFT_OUT}


def leaves(value):
    """The values in nested lists and dicts."""
    if not isinstance(value, list | dict):
        yield value
        return
    for inner in value.values() if isinstance(value, dict) else value:
        yield from leaves(inner)


def test_honest_values_stay_in_a_bundle():
    """Settings that are named as a secret might be, and what only looks like one."""
    config = {
        "models": {"token-mixer": {"call": "my.net", "kwargs": {
            "token_dim": 64, "max_tokens": 512, "tokens": 1024, "vocab": 38, "bos_token_id": 50256,
            "num_key_value_heads": 4, "key_dim": 32, "key": 64, "monkey": "see", "author": "Ada",
            "class_token": True, "auth": None, "tokens_by_layer": [8, 16],
        }}},
        "datasets": {"secret": {"text": "letters.txt", "tokenizer": "tokenizer.json"}},
        "studies": {"auth": {
            "description": "Three tokens of 64, keys and values; https://example.org/x?design=3&signal=9",
            "variants": {"token": {"strategy": "fsdp"}},
            "experiments": {"passwords": {"lr": 0.1, "models": ["token-mixer"], "dataset": "secret"}},
        }},
        "decide": {"score_tolerance": {"token_loss": 0.05}},
    }  # fmt: skip
    assert remove_secrets(config) == config
    plan = {"cells": {"main/ps-token/m/2gpu/rep0": {"settings": "0f3a", "infeasible": "no room"}}}
    assert remove_secrets(plan) == plan
    record = fixture.make_record(fixture.expand()[0])
    record["data"]["own"] = {"text": "a.txt", "tokenizer": "tokenizer.json", "sequence": 64}
    assert remove_secrets(record, is_record=True) == record


def test_names_are_replaced_everywhere_and_alike(study_dir, tmp_path):
    out, manifest = write_bundle(study_dir, CONFIG, "replaced", tmp_path / "x.zip")
    text = text_in(out.read_bytes())
    for name in (socket.gethostname(), "gpu-a07", "example.org", "secretlab", "alice", "10.1.2.3"):
        assert not re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", text, re.I), name
    assert str(Path.home()) not in text
    assert f"/{getpass.getuser()}/" not in text
    assert "GPU-0f0f" not in text
    assert manifest["hosts"] == "replaced"
    found = read_set(str(out))
    # As many hosts as before, and each the same one in every record.
    before = read_set(str(study_dir)).cells["host"]
    assert found.cells["host"].nunique() == before.nunique()
    assert list(found.cells["host"].factorize()[0]) == list(before.factorize()[0])
    assert set("; ".join(found.cells["host"].dropna()).split("; ")) <= {"node1", "node2", "node3"}
    assert found.has_replaced_host_names
    # The hosts of the samples are still those of the workers.
    told = ["rule", "strategy", "gpus", "repeat"]
    assert found.findings[told].equals(read_set(str(study_dir)).findings[told])


def test_a_host_named_like_a_word_of_records_garbles_nothing():
    cell = fixture.expand(("ddp",), ("vgg16",), (1,))[0]
    record = fixture.make_record(cell)
    record["workers"][0]["provenance"]["host"]["name"] = "vgg16"
    found = Replacements(["vgg16", "ddp", "ok", "host"], [], []).replace_names_in_record(record)
    assert found["workers"][0]["provenance"]["host"]["name"] == "node4"
    found["workers"][0]["provenance"]["host"]["name"] = "vgg16"
    assert found == record
    with pytest.raises(ValueError, match="the device cuda:0 has the name of a host"):
        Replacements(["cuda"], [], []).replace_names_in_record(record)


def test_a_timelines_numbers_and_phases_stay(tmp_path):
    text = "t_s,node,kind,id,phase\r\n12,train,gpu,0,train\r\n13,12,host,12,train\r\n"
    found = replace_names_in_timeline(text, Replacements(["train", "12"], [], []))
    assert found == text.replace(",train,g", ",node2,g").replace(
        "13,12,host,12", "13,node1,host,node1"
    )


def test_lists_of_nodes_are_read_as_slurm_writes_them():
    assert list(expand_node_list("gpu[01-03,7],login")) == [
        "gpu01",
        "gpu02",
        "gpu03",
        "gpu7",
        "login",
    ]
    assert list(expand_node_list("")) == []


def test_a_study_without_records_says_so(tmp_path, capsys):
    assert main(["bundle", "--study-dir", str(tmp_path)]) == 2
    assert "has no record" in capsys.readouterr().err


def test_check_tells_what_is_in_a_bundle(bundled, tmp_path, capsys):
    path = tmp_path / "x.zip"
    path.write_bytes(bundled)
    assert command(["check", str(path)]) in (0, 1)
    out = capsys.readouterr().out
    assert "cells: 8, of which 6 finished, 2 out of memory (OOM)" in out
    assert "audit: " in out
    assert "data set cifar10; epochs 6; global batch 128; precision fp32" in out.replace(
        "\n  ", " "
    )
    assert command(["check", str(tmp_path / "none.zip")]) == 2
    assert "does not exist" in capsys.readouterr().out


def test_check_ends_with_1_where_the_audit_rejects_figures(tmp_path, capsys):
    def impossible(cell, record):
        record["batch"]["samples_seen"] //= 2
        return record

    cells = fixture.expand(("ddp",), ("vgg16",), (1,))
    folder = fixture.write_study(tmp_path, cells, change=impossible)
    assert command(["check", str(folder)]) == 1
    assert "unusable: " in capsys.readouterr().out


# ---------------------------------------------------------------- bad bundles


def rewritten(content: bytes, change) -> bytes:
    """The bundle with its files changed by `change(dict of name to bytes)`, its manifest made to fit."""
    with zipfile.ZipFile(io.BytesIO(content)) as z:
        files = {name: z.read(name) for name in z.namelist()}
    manifest = json.loads(files.pop("manifest.json"))
    change(files)
    manifest["files"] = {
        name: {"sha256": hashlib.sha256(found).hexdigest(), "bytes": len(found)}
        for name, found in files.items()
    }
    manifest["sha256"] = archive.hash_manifest(manifest)
    return zipped({"manifest.json": json.dumps(manifest).encode(), **files})


def zipped(files, **of_each) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            for key, value in of_each.items():
                setattr(info, key, value)
            z.writestr(info, content)
    return out.getvalue()


RECORD = "cells/main/ddp/vgg16/2gpu/rep0/record.json"


def in_record(old: bytes, new: bytes):
    def change(files):
        assert old in files[RECORD]
        files[RECORD] = files[RECORD].replace(old, new, 1)

    return change


def put(name: str, content: bytes = b"{}"):
    return lambda files: files.__setitem__(name, content)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (put("../evil.json"), "outside of its folder"),
        (put("/etc/passwd"), "absolute path"),
        (put("C:\\evil.json"), "absolute path"),
        (put("cells/..\\..\\evil"), "outside of its folder"),
        (put("cells/a/b/c/1gpu/rep0/run.py"), "which no bundle has"),
        (put("<script>alert(1)</script>"), "which no bundle has"),
        (put("CELLS.json"), "which no bundle has"),
        (put("cells.json", b"{}"), "does not list cells"),
        (put("cells.json", b'[{"study": 1}]'), "seven coordinates"),
        (put("config.json", b"[" * 100_000), "too many levels"),
        (put("config.json", b'{"a": NaN}'), "NaN is not a number that JSON allows"),
        (put("config.json", b'{"a": ' + b"9" * 5000 + b"}"), "not JSON: an integer is too large for 64 bits"),
        (put("config.json", b'{"a": 1, "b": 2, "a": 3}'), "the key 'a' appears twice"),
        (in_record(b'"status": "ok"', b'"status": "oom", "status": "ok"'), "the key 'status' appears twice"),
        (put("config.json", b'"text"'), "no JSON object"),
        (put("plan.json", b"\xff\xfe"), "not JSON"),
        (put("cells/main/ddp/vgg16/2gpu/rep0/timeline.csv", b"\xff"), "cannot be read as text"),
        (put("cells/main/ddp/vgg16/2gpu/rep0/timeline.csv", b"a,b\n"), "is not a timeline"),
        (put(RECORD, b"{}"), "not a valid record"),
        (put("cells/main/fsdp/vgg16/2gpu/rep0/record.json", b"7"), "is not a record"),
        (in_record(b'"status": "ok"', b'"status": "<b>"'), "not a valid record"),
        (in_record(b'"repeat": 0', b'"repeat": 1'), "another cell"),
        (in_record(b'"train_time_s"', b'"x": 1e999, "train_time_s"'), "too large"),
        (in_record(b'"ddp"', b'"=HYPERLINK(1)"'), "another cell"),
        (lambda files: files.clear(), "has no record"),
    ],
)  # fmt: skip
def test_a_bad_file_in_a_bundle_ends_in_one_sentence(bundled, tmp_path, change, told):
    path = tmp_path / "bad.zip"
    path.write_bytes(rewritten(bundled, change))
    assert told in refused(path)
    assert command(["check", str(path)]) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.zip"]


def test_links_duplicates_bombs_and_changes_end_in_one_sentence(bundled, tmp_path, monkeypatch):
    path = tmp_path / "bad.zip"

    def told(content: bytes) -> str:
        path.write_bytes(content)
        return refused(path)

    with zipfile.ZipFile(io.BytesIO(bundled)) as z:
        files = {name: z.read(name) for name in z.namelist()}
    assert "link or a device" in told(zipped(files, external_attr=(stat.S_IFLNK | 0o777) << 16))
    assert "encrypted" in told(zipped_with_flag(files))
    assert "no manifest.json" in told(zipped({"config.json": b"{}"}))
    twice = RECORD.replace("rep0", "rep1")  # as long: renamed in the bytes of the zip
    assert "twice" in told(zipped(files).replace(twice.encode(), RECORD.encode()))
    changed = files | {RECORD: files[RECORD] + b" "}
    assert "has another hash" in told(zipped(changed))
    manifest = files["manifest.json"].replace(b'"named"', b'"replaced"')
    assert "was changed" in told(zipped(files | {"manifest.json": manifest}))
    assert "is not in its manifest" in told(zipped(files | {"plan.json": b"{}"}))
    del changed["config.json"]
    assert "but not in the bundle" in told(zipped(changed))
    version = files["manifest.json"].replace(b'"schema_version": 1', b'"schema_version": 99')
    assert "version 99" in told(zipped(files | {"manifest.json": version}))
    for content in (b"", b"PK", b"no zip", bundled[:-30], bundled[30:], b"#!/bin/sh\n" + bundled):
        assert "bundle" in told(content)
    # Bombs: what a header promises, and what it hides.
    monkeypatch.setattr(archive, "RATIO_FROM_BYTES", 1 << 20)
    assert "times its size" in told(zipped({"manifest.json": b" " * (2 << 20)}))
    monkeypatch.setattr(archive, "MAX_MEMBER_BYTES", 1 << 20)
    assert "of more than" in told(zipped({"manifest.json": b" " * (2 << 20)}))
    hidden = zipped({"manifest.json": b" " * (2 << 20)})
    hidden = hidden.replace(struct.pack("<L", 2 << 20), struct.pack("<L", 100))
    assert told(hidden)
    monkeypatch.setattr(archive, "MAX_BYTES", 1000)
    assert "unpacked bytes" in told(bundled)
    monkeypatch.setattr(archive, "MAX_MEMBERS", 3)
    assert "too many files" in told(bundled)
    monkeypatch.setattr(archive, "MAX_FILE_BYTES", 100)
    assert "bytes; a bundle has at most 100" in told(bundled)
    path.unlink()
    os.mkfifo(path)
    assert "regular file" in refused(path)


def zipped_with_flag(files) -> bytes:
    content = bytearray(zipped(files))
    at = content.index(b"PK\x01\x02")
    content[at + 8] |= 1
    return bytes(content)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mutated_bundles_end_in_a_sentence_or_are_read(bundled, tmp_path):
    chance = random.Random(17)
    path = tmp_path / "mutant.zip"

    def keep_one(files):
        for name in list(files):
            if name.startswith("cells/") and not name.startswith(RECORD[: -len("record.json")]):
                del files[name]
        files["cells.json"] = json.dumps([json.loads(files[RECORD])["cell"]]).encode()

    small, read = rewritten(bundled, keep_one), 0
    told: set[str] = set()
    for turn in range(300):
        content = bytearray(small)
        if turn % 3 == 2:  # inside a member, so that the zip is whole
            content = bytearray(
                rewritten(bytes(content), lambda files: mutate_member(files, chance))
            )
        else:
            for _ in range(chance.choice((1, 2, 8))):
                mutate(content, chance)
        path.write_bytes(content)
        try:
            read_set(str(path))
        except SetError as e:
            told.add(str(e))
        else:
            read += 1
    assert 5 < read < 240
    assert len({message.removeprefix(str(path))[:40] for message in told}) > 10
    assert all(message.isprintable() for message in told), "one sentence each, for a terminal"


def mutate(content: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(content))
    match chance.randrange(4):
        case 0:
            content[at] ^= 1 << chance.randrange(8)
        case 1:
            del content[at : at + chance.choice((1, 10, 1000))]
        case 2:
            content[at:at] = chance.randbytes(chance.choice((1, 4, 100)))
        case 3:
            content[at : at + 4] = struct.pack("<l", chance.choice((-1, 0, 1 << 20, 2**31 - 1)))


def mutate_member(files: dict[str, bytes], chance: random.Random) -> None:
    name = chance.choice([RECORD, "cells.json", "config.json"])
    text = files[name].decode()
    old = chance.choice(["1", "2", "{", "[", '"ok"', "null", "128", '"', ":", "vgg16", "true", "]"])
    new = chance.choice(
        ["-1", "NaN", "1e400", "null", '""', "[]", "{}", '"<script>"', '"=1+1"', ""]
    )
    spots = [i for i in range(len(text)) if text.startswith(old, i)]
    if spots:
        at = chance.choice(spots)
        files[name] = (text[:at] + new + text[at + len(old) :]).encode()
