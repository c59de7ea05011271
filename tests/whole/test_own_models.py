"""A user's own models: their arguments, their code, how they are sharded, and what each mistake says."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stratbench.cell.installation import PACKAGE
from stratbench.cell.settings import Settings
from stratbench.extensions.plan.check import make_footprint_or_error
from stratbench.extensions.plan.needs import make_cell_to_plan
from stratbench.study.config.config import Study, load_config
from stratbench.study.config.messages import ConfigError
from stratbench.telemetry.flops import count_flops
from stratbench.workload import tasks, users_code
from stratbench.workload.network import models, own, sharding
from stratbench.workload.network.own import OwnModel
from stratbench.workload.network.trial import run_trial_steps
from stratbench.workload.users_code import ModelError

CPU = torch.device("cpu")
TASK = tasks.Classification()
#: Networks of a file of its own for each test, since a module is imported once.
NETS = """
import torch
from torch import nn

class Named(nn.Linear):
    def __init__(self, num_classes, in_channels, image_size, width=3, channels=5):
        super().__init__(in_channels * image_size ** 2, num_classes)
        self.given = (num_classes, in_channels, image_size, width, channels)

    def forward(self, x):
        return super().forward(x.flatten(1))

class Averages(Named):
    def __init__(self, **given):
        super().__init__(**given)
        self.norm = nn.BatchNorm1d(in_features := self.in_features)

    def forward(self, x):
        return nn.Linear.forward(self, self.norm(x.flatten(1)))

class Looks(nn.Linear):
    def __init__(self, num_classes, in_channels):
        super().__init__(in_channels, num_classes)

class Reads(nn.Module):
    def __init__(self, vocab_size, block_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 4)
        self.places = nn.Embedding(block_size, 4)

    def forward(self, x):
        h = self.embedding(x) + self.places.weight
        return h @ self.embedding.weight.T

class Depths(Named):
    "Reads a tensor's values while it is built, which fake tensors do not have."
    def __init__(self, num_classes, in_channels, image_size):
        super().__init__(num_classes, in_channels, image_size)
        self.drops = [x.item() for x in torch.linspace(0, 1, 3)]

class Ends(Named):
    def forward(self, x):
        raise SystemExit("not written yet")

class Wide(Named):
    def forward(self, x):
        return torch.cat([super().forward(x)] * 2, 1)

def passes_on(**kwargs):
    return Named(in_channels=1, image_size=8, **kwargs)

def nothing(num_classes):
    return {"classes": num_classes}

def frozen(num_classes):
    return Named(num_classes, 1, 8).requires_grad_(False)

def needs(num_classes, depth):
    return Named(num_classes, 1, 8)

constant = 3
"""


@pytest.fixture
def nets(tmp_path, monkeypatch, request) -> str:
    """The name of a module with NETS, in a folder that is on the path of this process's jobs."""
    name = f"nets_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(NETS)
    monkeypatch.setenv(users_code.CODE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def experiment(**changes) -> dict:
    return {
        "dataset": "digits", "strategies": ["ddp"], "models": ["mine"], "gpus": [1], "epochs": 1,
        "global_batch": 16, "lr": 0.02, "device": "cpu",
    } | changes  # fmt: skip


def study_of(spec: dict, code: Path | None = None, **changes) -> tuple[dict, Study]:
    raw = {
        "study": "s",
        "models": {"mine": spec},
        "studies": {"s": {"experiments": {"first": experiment(**changes)}}},
    }
    return load_config(raw | ({"code": [str(code)]} if code else {}))


def first_settings(spec: dict, code: Path | None = None, **changes) -> Settings:
    _, study = study_of(spec, code, **changes)
    return study.settings(study.cells[0])


def trained_as(
    call: str, classes: int = 10, shape: tuple[int, ...] = (1, 8, 8), **spec
) -> nn.Module:
    said = {"call": call, "kwargs": {}, "wrap_classes": None} | spec
    model = models.make_metadata_or_keep_name("mine", said)
    net = models.build_model_for_training(model, classes, shape, 0, CPU, torch.float32)
    groups = models.list_shard_groups(model, net)
    models.run_model_trial(model, net, classes, shape, groups, TASK, torch.float32)
    return net


# --- arguments -----------------------------------------------------------------------------------


def test_what_follows_from_the_data_is_filled_in_by_name(nets):
    assert trained_as(f"{nets}.Named").given == (10, 1, 8, 3, 5)
    given = trained_as(
        f"{nets}:Named", shape=(3, 8, 8), kwargs={"width": 7, "channels": "$channels"}
    )
    assert given.given == (10, 3, 8, 7, 3)
    assert trained_as(f"{nets}.passes_on").given == (10, 1, 8, 3, 5)
    assert trained_as(f"{nets}.Reads", 65, (12,)).places.num_embeddings == 12


def test_placeholders_stand_anywhere_in_kwargs():
    facts = own.collect_data_values(65, (12,))
    value = {"sizes": ["$vocabulary", {"length": "$sequence"}], "name": "plain"}
    assert own.insert_data_values(value, facts) == {"sizes": [65, {"length": 12}], "name": "plain"}
    assert own.collect_data_values(10, (3, 8, 6))["size"] == [8, 6]


def test_the_network_of_torchvision_has_three_channels_by_name_and_by_call():
    for call in ("torchvision.models.resnet18", "torchvision.models:resnet18"):
        model = models.make_metadata_or_keep_name(
            "r", {"call": call, "kwargs": {}, "wrap_classes": None}
        )
        assert models.compute_input_shape(model, (1, 8, 8)) == (3, 32, 32)
    net = models.build_model_for_training(model, 7, (3, 32, 32), 0, CPU, torch.float32)
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    with pytest.raises(ValueError, match="r takes images, but the data set has texts"):
        models.compute_input_shape(model, (64,))


def test_a_scan_finds_torchvisions_classification_networks_and_imports_nothing():
    from torchvision import models as theirs

    assert own.list_torchvision_names() == set(theirs.list_models(module=theirs))
    code = (
        "import sys; from stratbench.study.config.config import load_config; "
        "from stratbench.workload.network import own; "
        "assert 'swin_t' in own.list_torchvision_names(); assert not {'torch', 'torchvision'} & "
        "set(sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=env)


#: One that needs nothing, those that need arguments or sizes of their own, one whose blocks own parameters,
#: and one that reads its children's weights.
OF_TORCHVISION = (
    "resnet18", "alexnet", "googlenet", "inception_v3", "maxvit_t", "vit_h_14", "convnext_tiny", "swin_t",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TORCHVISION)
def test_a_network_of_torchvision_works_by_its_name_alone(name):
    model = models.make_metadata_or_keep_name(name, models.get_model_specification(name, {}))
    shape = models.compute_input_shape(model, (1, 28, 28))
    with FakeTensorMode(allow_non_fake_inputs=True):
        net = models.build_fake_model(model, 10, shape).train()
        groups = models.list_shard_groups(model, net)
        found = models.run_model_trial(model, net, 10, shape, groups, TASK, torch.float32)
    assert found.parameters_read_before_call == found.parameters_read_after_calls == ()
    # Of some, all outputs but one are for training at other sizes.
    assert found.parameters_without_gradient == (), found.parameters_without_gradient
    assert groups
    parameters = [p for _, ms in groups for m in ms for p in m.parameters()]
    assert len(parameters) == len(set(parameters))


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            "no_such_net.Net",
            "importing no_such_net raised ModuleNotFoundError: No module named 'no_such_net'; name its "
            "folder in `code`, or install it",
        ),
        ("{nets}.Nmed", "{nets} has no 'Nmed'; correct the name"),
        ("{nets}.constant", "is a int, which cannot be called; name a class or function"),
        ("{nets}.nothing", "returned a dict; return a torch.nn.Module"),
        ("{nets}.frozen", "has no parameter to train; set requires_grad of some parameters"),
        (
            "{nets}.needs",
            "called with (num_classes=10), raised TypeError: needs() missing 1 required positional "
            "argument: 'depth'",
        ),
        (
            "{nets}.Wide",
            "returned a tensor [2, 20] for a batch [2, 1, 8, 8]; with 10 classes the tensor must be [2, 10]",
        ),
        (
            "{nets}.Ends",
            "its forward of a batch [2, 1, 8, 8] raised SystemExit: not written yet ({nets}.py, line 43)",
        ),
        (
            "{nets}.Reads",
            "called with (), raised TypeError: Reads.__init__() missing 2 required positional "
            "arguments: 'vocab_size' and 'block_size'; the data set has images, which have no block_size and "
            "no vocab_size",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_says_why_in_one_sentence(nets, call, sentence):
    call = call.format(nets=nets)
    with pytest.raises(ModelError) as raised:
        trained_as(call)
    assert str(raised.value) == f"model 'mine' ({call}): {sentence.format(nets=nets)}"


def test_a_network_of_images_is_told_that_the_data_are_texts(nets):
    with pytest.raises(ModelError, match=r"; the data set has texts, which have no in_channels$"):
        trained_as(f"{nets}.Looks", shape=(16,))


@pytest.mark.parametrize(
    "text", ["def broken(:", "raise KeyError('at import')", "raise SystemExit(3)"]
)
def test_an_error_of_the_users_code_is_the_plans_sentence(tmp_path, monkeypatch, text):
    name = f"broken_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv(users_code.CODE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    config, study = study_of({"call": f"{name}.Net"}, tmp_path)
    sentence = make_footprint_or_error(make_cell_to_plan(config, study, study.cells[0]).request)
    assert sentence.startswith(f"model 'mine' ({name}.Net): importing {name} raised "), sentence


def test_a_network_that_asks_for_values_is_not_predicted_and_the_plan_says_why(
    tmp_path, monkeypatch
):
    (tmp_path / "asking.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, num_classes, in_channels, image_size):\n"
        "        super().__init__(in_channels * image_size**2, num_classes)\n"
        "    def forward(self, x):\n"
        "        return super().forward(x.flatten(1)) * (1 if x.mean().item() > 0 else 2)\n"
    )
    monkeypatch.setenv(users_code.CODE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    config, study = study_of({"call": "asking.Net"}, tmp_path)
    sentence = make_footprint_or_error(make_cell_to_plan(config, study, study.cells[0]).request)
    assert sentence == "its forward reads values of tensors, and a prediction has none"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"call": "Net"}, "config: models.mine.call = 'Net': is not a module and a name within it"),
        (
            {"call": "a.b;c"},
            "config: models.mine.call = 'a.b;c': is not a module and a name within it",
        ),
        (
            {"call": "a.B", "kwargs": {"a-b": 1}},
            "config: models.mine.kwargs: 'a-b' is not a Python parameter name",
        ),
        (
            {"call": "a.B", "kwargs": {"x": "$vocabulary"}},
            "'$vocabulary' stands for a value that the data set does not have",
        ),
        (
            {"kwargs": {"a": 1}},
            "config: models.mine: has no source; give exactly one of call, transformers and timm",
        ),
        (
            {},
            "mine: it has a name alone, so only a trainer of your own (strategy `command`) builds it",
        ),
        (
            {"call": "torchvision.models.alexnet", "wrap_classes": []},
            "config: models.mine.wrap_classes: must not be",
        ),
    ],
)
def test_a_mistake_in_models_is_told_before_anything_is_imported(spec, message):
    with pytest.raises(ConfigError) as raised:
        study_of(spec)
    assert message in str(raised.value)


def test_names_that_cannot_be_are_refused():
    raw = {
        "study": "s",
        "studies": {"s": {"experiments": {"first": experiment(models=["resnet81"])}}},
    }
    with pytest.raises(
        ConfigError, match=r"'resnet81': is not a model.* of torchvision is allowed"
    ):
        load_config(raw)
    study = {"s": {"experiments": {"first": experiment(models=["resnet50"])}}}
    with pytest.raises(
        ConfigError, match=r"models\.vgg16: 'vgg16' is built in; choose another name"
    ):
        load_config(raw | {"studies": study, "models": {"vgg16": {"call": "a.B"}}})
    with pytest.raises(ConfigError, match="code = 'no-such-folder': is not a folder"):
        load_config(raw | {"studies": study, "code": ["no-such-folder"]})


def test_a_buffer_that_forward_only_reads_is_not_said_to_be_written():
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.scale)

    found = run_trial_steps("it", Scaled(), torch.zeros(2, 3), torch.tensor([0, 1]), [2, 2])
    assert found.written_buffers == ()


# --- code ----------------------------------------------------------------------------------------


def test_the_settings_follow_the_content_of_the_code_and_not_its_place(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        (folder / "pack").mkdir(parents=True)
        (folder / "pack" / "__init__.py").write_text("from pack import net\nimport shared\n")
        (folder / "pack" / "net.py").write_text("Net = 1\n")
        (folder / "shared.py").write_text("raise RuntimeError('is not imported here')\n")
        (folder / "other.py").write_text("")
    spec = {"call": "pack.net.Net"}
    texts = [first_settings(spec, folder).as_json() for folder in folders]
    assert texts[0] == texts[1]
    assert str(tmp_path) not in texts[0]
    files = users_code.find_source_files("pack.net.Net", folders)
    assert list(files) == ["pack/__init__.py", "pack/net.py", "shared.py"]
    for name, changes in (("other.py", False), ("shared.py", True)):
        (folders[1] / name).write_text("# changed\n")
        assert (first_settings(spec, folders[1]).as_json() != texts[0]) == changes


def test_code_that_changes_after_the_start_of_a_run_is_not_trained(nets, tmp_path):
    call = f"{nets}.Named"
    spec = first_settings({"call": call}, tmp_path).own_model
    users_code.check_user_code_unchanged("mine", spec)
    (tmp_path / f"{nets}.py").write_text(NETS + "\n")
    with pytest.raises(ModelError, match="its code has changed"):
        users_code.check_user_code_unchanged("mine", spec)


def test_an_installed_package_counts_by_its_version():
    _, study = study_of({"call": "torchvision.models.alexnet"})
    found = study.get_own_model_specification("mine")
    assert found["sha256"] is None
    assert found["version"] == metadata.version("torchvision")


def test_built_in_models_have_no_such_setting_and_others_keep_theirs_through_json(tmp_path):
    assert first_settings({"call": "a.B"}, models=["vgg-compact"]).own_model is None
    s = first_settings({"call": "a.B"}, tmp_path, models=["mine"])
    assert Settings.from_json(s.as_json()) == s
    _, study = study_of({"call": "a.B"}, tmp_path)
    kept = study.build_training_config() | {"own_code": study.describe_own_code()}
    assert Study(kept, "s").settings(study.cells[0]) == study.settings(study.cells[0])


# --- building ------------------------------------------------------------------------------------


def test_a_network_that_reads_values_while_it_is_built_is_planned_all_the_same(nets, tmp_path):
    config, study = study_of({"call": f"{nets}.Depths"}, tmp_path)
    footprint = make_footprint_or_error(make_cell_to_plan(config, study, study.cells[0]).request)
    assert footprint.model_states_bytes["parameters_bytes"] == 4 * 650
    model = models.get_model_or_name(study.settings(study.cells[0]))
    build = lambda: models.build_fake_model(model, 10, (1, 8, 8))  # noqa: E731
    assert count_flops(build, (1, 8, 8))["forward_flops_per_sample"] == 2 * 64 * 10


def test_trying_a_network_leaves_no_trace_in_it(nets):
    net = trained_as(
        f"{nets}.Averages", kwargs={"num_classes": 10, "in_channels": 1, "image_size": 8}
    )
    assert net.training
    assert int(net.norm.num_batches_tracked) == 0
    assert not net.norm.running_mean.any()
    assert not [
        name for name in os.listdir(os.environ[users_code.CODE_VARIABLE]) if name == "__pycache__"
    ]


# --- sharding ------------------------------------------------------------------------------------


class Unit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def labels(groups: sharding.ShardGroups) -> list[str]:
    return [label for label, _ in groups]


def test_by_size_holders_are_divided_and_what_shares_a_weight_stays_with_the_root():
    net = nn.Sequential(nn.ModuleList(Unit(8) for _ in range(24)), nn.Linear(8, 8))
    groups = sharding.group_modules_by_size(net)
    assert len(groups) == 9  # of 25 equal parts by threes, and the head
    assert labels(groups)[:2] == ["0.0", "0.3"]
    net[0][3].inner.weight = net[1].weight
    groups = sharding.group_modules_by_size(net)
    grouped = {p for _, ms in groups for m in ms for p in m.parameters()}
    assert net[1].weight not in grouped
    assert net[0][3].inner.bias not in grouped
    assert labels(groups)[-1] != "1"


def test_by_size_what_pytorch_reads_from_outside_is_not_divided():
    attention = nn.MultiheadAttention(8, 2)
    net = nn.Sequential(attention, nn.Linear(8, 1))
    assert labels(sharding.group_modules_by_size(net)) == ["0", "1"]


def test_by_class_the_outermost_instances_and_an_unknown_class_is_told():
    net = nn.Sequential(nn.Sequential(Unit(4), nn.Linear(4, 4)), Unit(4))
    said = OwnModel("mine", "a.B", {}, ["Unit", "Linear"])
    assert labels(sharding.group_modules_by_class(net, ["Unit", "Linear"], said)) == [
        "0.0",
        "0.1",
        "1",
    ]
    with pytest.raises(
        ModelError,
        match="wrap_classes names 'Blok', but no module of the model has this class; use",
    ):
        sharding.group_modules_by_class(net, ["Blok"], said)


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("fine.Net", None),
        ("fine:Net.made", None),
        ("fine.Listed", None),
        ("stars.Net", None),
        ("packed.inner.Net", None),
        ("torchvision.models.resnet18", None),
        ("fine.Nett", "fine.py has no 'Nett'; it has Net, made"),
        ("broken.Net", "broken.py, line 2: "),
        (
            "nowhere.Net",
            "there is no nowhere.py and no package nowhere; name its folder in `code`, or",
        ),
    ],
)
def test_a_call_that_cannot_be_imported_is_seen_before_a_job_starts(tmp_path, call, fault):
    files = {
        "fine.py": "from torch.nn import Linear as Listed\nclass Net: ...\ndef made(): ...\nraise SystemExit",
        "stars.py": "from torch.nn import *",
        "broken.py": "class Net: ...\ndef made(:",
        "packed/__init__.py": "raise SystemExit",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = users_code.unimportable_code_reason(call, [tmp_path])
    assert found is None if fault is None else found.startswith(fault)


def test_each_broken_model_and_task_of_the_cells_is_named_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text("class Mine: ...")
    block = {
        "dataset": "digits", "strategies": ["single", "ddp"], "models": ["mine", "other"], "gpus": [1],
        "epochs": 1, "global_batch": 4, "lr": 0.1, "task": "gone:Task",
    }  # fmt: skip
    config = {
        "study": "s",
        "models": {"mine": {"call": "nets.Mine"}, "other": {"call": "nets.Other"}},
        "studies": {"s": {"experiments": {"e": block}}},
    }
    _, study = load_config(config)
    assert study.list_import_errors(study.cells) == [
        "task (gone:Task): there is no gone.py and no package gone; name its folder in `code`, or install it",
        "model 'other' (nets.Other): nets.py has no 'Other'; it has Mine",
    ]


@pytest.mark.slow
def test_an_upgrade_of_what_a_users_file_imports_is_another_code(tmp_path, monkeypatch):
    """A name that is no distribution's, one of PyTorch's and one that is not installed say nothing."""
    (tmp_path / "my_net.py").write_text(
        "import json, torch, yaml, my_parts\nfrom jsonschema import validate\nimport no_such_thing\n"
    )
    (tmp_path / "my_parts.py").write_text("def f():\n    from jinja2 import Template\n")
    found = users_code.compute_code_fingerprint("my_net.Net", [tmp_path])
    names = {"jinja2": "jinja2", "jsonschema": "jsonschema", "yaml": "PyYAML"}
    assert found["version"] == ", ".join(f"{n} {metadata.version(d)}" for n, d in names.items())
    users_code._find_package_version.cache_clear()
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda d: "9" if d == "jinja2" else real(d))
    upgraded = users_code.compute_code_fingerprint("my_net.Net", [tmp_path])
    users_code._find_package_version.cache_clear()
    assert upgraded["version"] == found["version"].replace(real("jinja2"), "9")
    assert upgraded["sha256"] == found["sha256"]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("attrs.Net", "attrs.py hides the installed module"),
        ("random.Net", "random.py hides the installed module"),
        ("my_net.Net", "jinja2 hides the installed module"),
        ("my_other.Net", None),
    ],
)
def test_a_file_with_the_name_of_an_installed_module_is_told(tmp_path, call, told):
    """Whoever imports that module in a job, such as jsonschema `attrs`, would have the file."""
    for name in ("attrs.py", "random.py", "my_other.py", "jinja2/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("class Net: ...")
    (tmp_path / "my_net.py").write_text("import jinja2\nclass Net: ...")
    found = users_code.unimportable_code_reason(call, [tmp_path])
    assert found is None if told is None else found.startswith(told)
    with nullcontext() if told is None else pytest.raises(ConfigError, match=f"call = .*: {told}"):
        study_of({"call": call}, tmp_path)
