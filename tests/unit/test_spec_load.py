import string
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.spec.load import LARGEST_BYTES, NoSpec, Problem, SpecError, SpecFile, load, parse
from deploy.spec.model import Spec
from deploy.spec.positions import positions

ROOT = Path(__file__).parents[2]
FILE = Path("deploy.toml")


def problems(text: str) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        parse(text, FILE)
    return caught.value.problems


def only(text: str) -> Problem:
    found = problems(text)
    assert len(found) == 1, found
    return found[0]


def test_the_file_in_the_repository_says_exactly_the_defaults() -> None:
    assert load(ROOT / "deploy.toml").spec == Spec()


def test_an_empty_file_is_the_default() -> None:
    assert parse("", FILE).spec == Spec()


def test_the_command_line_replaces_the_profile_and_is_named_as_its_origin() -> None:
    loaded = parse('profile = "pd"\n', FILE, "cpu")
    assert loaded.spec.profile == "cpu"
    assert loaded.origin("profile") == "--profile"


def test_an_origin_is_the_line_of_the_key_and_none_for_a_default() -> None:
    loaded = parse("[router]\n\nport = 1234\n", FILE)
    assert loaded.origin("router", "port") == "deploy.toml:3"
    assert loaded.origin("router", "bind") is None


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="does not exist"):
        load(tmp_path / "deploy.toml")


def test_a_syntax_error_names_line_and_column() -> None:
    problem = only("[router]\nport = = 3\n")
    assert problem.position == (2, 8)
    assert "TOML" in problem.message


def test_an_unfinished_file_is_a_syntax_error_at_its_end() -> None:
    assert only("[router").position.line == 1


def test_an_unknown_key_suggests_the_close_one_and_lists_the_allowed() -> None:
    problem = only("[router]\nprot = 1\n")
    assert problem.position == (2, 1)
    assert problem.fix == "did you mean port?"
    assert "bind, port" in problem.why


def test_an_unknown_key_that_another_table_has_is_sent_there() -> None:
    assert only("[prefill]\ncontext_length = 4\n").fix == "did you mean engine.context_length?"


def test_a_wrong_choice_lists_the_choices() -> None:
    problem = only('transport = "isolate"\n')
    assert problem.why == "allowed: 'isolated' or 'p2p'"
    assert problem.fix == 'did you mean "isolated"?'


def test_several_mistakes_are_all_reported_in_the_order_of_the_file() -> None:
    found = problems('[router]\nport = 99999\nbind = "x"\n[engine]\nspeculate = 1\n')
    assert [(problem.position.line, problem.key) for problem in found] == [
        (2, "router.port"),
        (3, "router.bind"),
        (5, "engine.speculate"),
    ]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('profile = "replicas"\n', 1, "without a [[replica]]"),
        ("[prefill]\ngpus = [0, 1]\n", 1, "prefill has 2 GPUs and decode 4"),
        ("[prefill]\ngpus = [0, 1]\n[decode]\ngpus = [2, 3]\n", 2, "2 GPUs a role"),
        ("[decode]\ngpus = [3, 4, 5, 6]\n", 2, "both have nvidia.com/gpu=3"),
        ('[decode]\ngpus = [4, 5, 6, "nvidia.com/gpu=0"]\n', 2, "both have nvidia.com/gpu=0"),
        ("[decode]\ngpus = [4, 4, 5, 6]\n", 2, "listed twice"),
        ("[decode]\nnuma_node = [1, 1, 1, 1]\n", 2, "decode.numa_node"),
        ('[decode]\ngpus = [4, 5, 6, "seven"]\n', 2, "decode.gpus[3]"),
        ('[engine]\nspeculation = "eagle"\n', 2, "speculation 'eagle'"),
        ('[decode]\nextra_arguments = "--speculative-algorithm EAGLE"\n', 2, "--speculative"),
        ('[router]\nbind = "0.0.0.0"\n', 2, "reachable from other machines"),
        ('[variables]\nX = 1\nPYTORCH_CUDA_ALLOC_CONF = "expandable_segments:True"\n', 3, "allocator"),
        ("[engine]\nmemory_fraction = 1.5\n", 2, "1.5"),
        ('[prefill]\ncpus = "0..3"\n', 2, "prefill.cpus"),
        ("[router]\nport = 0\n", 2, "router.port"),
        ("prefill = 3\n", 1, "prefill"),
        ('[image]\nregistry = "a registry"\n', 2, "image.registry"),
        ('[image]\npublic_key = "cosign.pub"\n', 2, "a public key without a registry"),
        (
            '[model]\nvariant = "nvfp4"\n[engine]\nmoe_backend = "flashinfer_mxfp4"\n',
            4,
            "flashinfer_mxfp4 with the nvfp4",
        ),
        ('[engine]\nmoe_backend = "cutlass"\n', 2, "'cutlass' is not allowed"),
        ('[engine]\nmoe_backend = "flashinfer_cutlass"\n', 2, "flashinfer_cutlass with the mxfp4"),
        ('[engine]\ndraft_path = "d"\n', 2, "a draft model with speculation 'none'"),
    ],
)
def test_what_is_refused_names_its_line_and_a_reason(text: str, line: int, words: str) -> None:
    problem = problems(text)[0]
    assert words in problem.message
    assert problem.position.line == line
    assert problem.why and problem.fix


def replicas(*gpus: str, rest: str = "") -> str:
    """A spec with one [[replica]] for each list of GPUs, the first in line 2."""
    tables = "".join(f"[[replica]]\ngpus = {names}\nnuma_node = 0\n" for names in gpus)
    return f'profile = "replicas"\n{tables}{rest}'


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (replicas("[0, 1]", "[2, 3, 4, 5]"), 6, "4 GPUs here and 2 in the first"),
        (replicas("[0, 1]", "[1, 2]"), 6, "engine and engine-2 both have nvidia.com/gpu=1"),
        (replicas("[0, 1]", "[2, 2]"), 6, "listed twice"),
        (replicas("[0]"), 3, "engines of 1 GPUs"),
        (replicas("[0, 1, 2]"), 3, "engines of 3 GPUs"),
        (replicas("[0, 1]", "[2, 3]", "[4, 5]", "[6, 7]", "[8, 9]"), 14, "5 engines of 2 GPUs"),
        (replicas("[0, 1, 2, 3]", "[4, 5, 6, 7]", "[8, 9, 10, 11]"), 8, "3 engines of 4 GPUs"),
        ('profile = "replicas"\n[[replica]]\ngpus = [0, 1]\n', 2, "'numa_node' is missing"),
        (replicas("[0, 1]", rest="gpu = 3\n"), 5, "replica[0].gpu: unknown key"),
        ('profile = "replicas"\n[replica]\ngpus = [0, 1]\n', 2, "one table"),
        ('transport = "p2p"\n' + replicas("[0, 1]"), 1, "transport 'p2p' with profile replicas"),
        (
            replicas("[0, 1]", rest='[model]\nvariant = "nvfp4"\n[engine]\nspeculation = "eagle"\n'),
            8,
            "speculation 'eagle' with the nvfp4",
        ),
    ],
)
def test_what_is_refused_of_replicas_names_its_line_and_a_reason(text: str, line: int, words: str) -> None:
    problem = problems(text)[0]
    assert words in problem.message
    assert problem.position.line == line
    assert problem.why and problem.fix


LAYOUTS = [(2, 1), (2, 2), (2, 3), (2, 4), (4, 1), (4, 2)]


@pytest.mark.parametrize(("size", "engines"), LAYOUTS)
@pytest.mark.parametrize("speculation", ["none", "eagle", "dspark"])
def test_one_to_four_engines_of_two_gpus_and_one_or_two_of_four_may_speculate(
    size: int, engines: int, speculation: str
) -> None:
    lists = [str(list(range(k * size, (k + 1) * size))) for k in range(engines)]
    spec = parse(replicas(*lists, rest=f'[engine]\nspeculation = "{speculation}"\n'), FILE).spec
    assert list(spec.roles) == ["engine", "engine-2", "engine-3", "engine-4"][:engines]
    assert (spec.gpus_per_engine, spec.moe_backend) == (size, "flashinfer_mxfp4")


@given(st.lists(st.lists(st.integers(0, 11), max_size=5), max_size=6))
def test_only_known_layouts_with_a_gpu_each_once_are_accepted(gpus: list[list[int]]) -> None:
    allowed = (
        gpus
        and (len(gpus[0]), len(gpus)) in LAYOUTS
        and {len(group) for group in gpus} == {len(gpus[0])}
        and len({gpu for group in gpus for gpu in group}) == sum(map(len, gpus))
    )
    try:
        parse(replicas(*map(str, gpus)), FILE)
        accepted = True
    except SpecError:
        accepted = False
    assert accepted == bool(allowed)


def test_topology_does_not_matter_on_a_machine_without_gpus() -> None:
    text = 'profile = "cpu"\n[prefill]\ngpus = [0]\n'
    assert parse(text, FILE).spec.profile == "cpu"


@given(st.text(alphabet=string.printable + "é∂\u2028", max_size=200))
def test_no_text_gives_anything_but_a_spec_or_a_spec_error(text: str) -> None:
    try:
        assert isinstance(parse(text, FILE), SpecFile)
    except SpecError as error:
        assert error.problems


keys = st.text(alphabet='ab-_é. "', min_size=1, max_size=4)
values = st.recursive(
    st.integers() | st.booleans() | st.text(alphabet="x#]['\"\\\n=", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=2),
    max_leaves=5,
)


@given(st.dictionaries(keys, st.dictionaries(keys, values, max_size=3), max_size=3))
def test_every_value_of_a_document_has_the_position_of_its_key(data: dict[str, dict[str, Any]]) -> None:
    text = "".join(
        f"# note\n[{quote(table)}]\n" + "".join(f"  {quote(key)} = {inline(value)}\n" for key, value in body.items())
        for table, body in data.items()
    )
    assert tomllib.loads(text) == data
    places = positions(text)
    lines = text.split("\n")
    for table, body in data.items():
        for key in body:
            line, column = places[(table, key)]
            assert lines[line - 1][column - 1 :].startswith(f"{quote(key)} = ")
            assert column == 3
    assert set(paths(data)) == set(places)


def quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def inline(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(inline, cast(list[Any], value)))}]"
    if isinstance(value, dict):
        table = cast(dict[str, Any], value)
        return "{" + ", ".join(f"{quote(key)} = {inline(inner)}" for key, inner in table.items()) + "}"
    return quote(value) if isinstance(value, str) else str(value).lower()


def paths(value: Any, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(cast(dict[str, Any], value).items())
    elif isinstance(value, list):
        items = list(enumerate(cast(list[Any], value)))
    return [path for key, inner in items for path in [(*prefix, key), *paths(inner, (*prefix, key))]]


def test_the_mark_that_some_editors_begin_a_file_with_is_none_of_it() -> None:
    assert parse('\ufeffprofile = "cpu"\n', FILE).spec.profile == "cpu"


def test_thousands_of_brackets_are_refused() -> None:
    with pytest.raises(SpecError, match="thousands deep"):
        parse("a=" + "[" * 20_000, FILE)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"#" * (LARGEST_BYTES + 1)])
def test_what_is_no_text_or_far_too_long_is_a_wrong_command_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "deploy.toml"
    file.write_bytes(content)
    for path in (file, tmp_path):
        with pytest.raises(NoSpec) as error:
            load(path)
        assert error.value.exit_code == 2
