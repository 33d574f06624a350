"""bench/audit.py: what it reads in machine code, what it refuses, and a part of it for real.

The listings here are in the tools' own notation, cut down to loops of a few instructions.
"""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from auditing import budget, table
from auditing.bounds import CARDS, bound
from auditing.budget import Allowance, Budget
from auditing.cases import calls, cases, writes
from auditing.compiling import (
    DoesNotCompile,
    own_words,
    spilled_bytes,
    spilled_bytes_of_hip,
)
from auditing.disassembly import Instruction, parse
from auditing.figures import Kernel, part_of, read_loop
from auditing.judging import violations
from auditing.loops import steady_loop
from flashwire_kernels.fused.config import PASSES, SHARED_BYTES, Key, choose, family, shipped

BENCH = Path(__file__).parents[2] / "bench"
SCORES = 16
"""Of the tile that the listings are for: 64x32 by 4 warps."""

PRODUCTS = [
    *["HGMMA.64x32x16.F32.BF16 R24, R184, gdesc[UR16], RZ, !UPT ;"] * 4,
    *["HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR20].tnspB, R56, gsb0 ;"] * 2,
]
SOFTCAP = ["MUFU.EX2 R25, R25 ;"] * SCORES  # of each score one more, in what is modified
CLEAN = [
    "UTMALDG.4D [UR8], [UR4] ;",
    *PRODUCTS,
    *["FFMA R24, R24, R9, -R8 ;", "MUFU.EX2 R24, R24 ;", "FADD R2, R2, R24 ;"] * SCORES,
    "MUFU.EX2 R7, R7 ;",
    "ISETP.GE.AND P0, PT, R5, R4, PT ;",
]
MASKED = [*CLEAN, *["ISETP.GE.AND P2, PT, R3, R4, PT ;", "FSEL R24, R24, -INF , P2 ;"] * SCORES]


def sass(*parts: str | list[str]) -> str:
    """A listing as nvdisasm writes it; labels end with a colon."""
    lines, at = ["\t.section\t.text.kernel", ".text.kernel:"], 0
    for part in parts:
        for line in [part] if isinstance(part, str) else part:
            if line.endswith(":"):
                lines.append(line)
                continue
            guard, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
            lines.append(f"        /*{at:04x}*/ {guard:>18} {rest}")
            at += 16
    return "\n".join(lines)


def looped(body: list[str], label: str) -> list[str]:
    return [f".L_x_{label}:", *body, f"@P0 BRA `(.L_x_{label}) ;"]


def amd(*lines: str) -> str:
    text = [line if line.startswith(".") else f"\t{line}" for line in lines]
    return "\n".join(['\t.amdgcn_target "amdgcn-amd-amdhsa--gfx942"', "kernel:", *text])


def steady(listing: str):
    return steady_loop(parse(listing), SCORES)


def test_sass_is_read():
    listing = sass(
        "@P1 LDG.E.128 R4, desc[UR4][R2.64] ;",
        ".L_x_7:",
        "@!PT LDS RZ, [RZ] ;",
        "BRA.U UP0, `(.L_x_7) ;",
        "@!P2 CALL.REL.NOINC `(.L_x_7) ;",
        "BRA.DIV UR4, `(.L_x_7) ;",
        'BRX R2 -0x2e0 (*"BRANCH_TARGETS .L_x_7,.L_x_8"*);',
        "STS.U16 [R2], R4 ;",
    )
    code = parse(listing)
    load, off, uniform, call, diverged, table_jump, store = code.instructions
    assert code.labels == {".L_x_7": 1}
    assert (load.name, load.guard, load.load_width) == ("LDG.E.128", "P1", 16)
    assert off.off
    assert (uniform.guard, uniform.targets) == ("UP0", (".L_x_7",))
    assert (call.guard, call.targets) == ("!P2", (".L_x_7",))
    assert (diverged.targets, diverged.leaves) == ((".L_x_7",), False)
    assert (table_jump.targets, table_jump.leaves) == ((".L_x_7", ".L_x_8"), True)
    assert store.narrow_store


def test_a_listing_without_instructions_is_refused():
    with pytest.raises(ValueError, match="no instructions"):
        parse("\t.section\t.text.kernel")


def test_the_steady_loop_is_the_unmasked_one():
    found = steady(sass(looped(MASKED, "0"), looped(CLEAN, "1"), "EXIT ;"))
    assert (len(found.body), found.tiles) == (len(CLEAN) + 1, 1)


def test_of_an_unrolled_loop_and_its_remainder_the_former_counts():
    found = steady(
        sass(looped(CLEAN * 2, "0"), looped(CLEAN, "1"), looped(MASKED * 2, "2"), "EXIT ;")
    )
    assert (len(found.body), found.tiles) == (2 * len(CLEAN) + 1, 2)


def test_a_loop_around_the_loops_over_tiles_does_not_count():
    both = [*looped(CLEAN, "1"), *looped(MASKED, "2")]
    around = [".L_x_0:", "FADD R2, R2, R3 ;", *both, "@P3 BRA `(.L_x_0) ;"]
    found = steady(sass(around, "EXIT ;"))
    assert (len(found.body), found.tiles) == (len(CLEAN) + 1, 1)


def test_waits_within_do_not_count():
    tiles = [
        ".L_x_1:",
        "@!P1 BRA `(.L_x_5) ;",
        ".L_x_6:",
        *CLEAN,
        "@!PT LDS RZ, [RZ] ;",
        "@P0 BRA `(.L_x_1) ;",
    ]
    wait = [".L_x_5:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR16], R2 ;", "@!P1 BRA `(.L_x_5) ;"]
    found = steady(sass(tiles, "EXIT ;", wait, "BRA `(.L_x_6) ;"))
    assert len(found.body) == len(CLEAN) + 2


def test_what_specialised_warps_do_elsewhere_counts():
    multiply, softmax = CLEAN[1:7], CLEAN[7:]
    load, rescale = CLEAN[:1], ["LDTM.x64 R4, tmem[UR15] ;", "FMUL R4, R4, R2 ;"]
    parts = [looped(part, str(i)) for i, part in enumerate([load, multiply, rescale, softmax])]
    jump = 'BRX R2 -0x2e0 (*"BRANCH_TARGETS .L_x_0,.L_x_1,.L_x_2,.L_x_3"*);'
    ended = [[*part, "EXIT ;"] for part in parts]
    found = steady(sass(jump, *ended))
    assert len(found.body) == len(CLEAN) + len(rescale) + len(parts)
    assert sum(i.matrix for i in found.body) == len(multiply)


def test_a_loop_entered_in_its_middle_is_whole():
    listing = amd(
        "s_branch .LBB0_2",
        ".LBB0_1:",
        "v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]",
        "s_cbranch_scc0 .LBB0_3",
        ".LBB0_2:",
        *["v_exp_f32_e32 v1, v2"] * SCORES,
        "s_branch .LBB0_1",
        ".LBB0_3:",
        "s_endpgm",
    )
    found = steady(listing)
    assert len(found.body) == SCORES + 3


def test_no_loop_takes_the_exponentials():
    assert steady(sass(looped(CLEAN[:3], "0"), "EXIT ;")) is None


def case_named(name: str):
    return next(case for case in cases() if str(case) == name)


def kernel(
    listing: str, name: str = "sm_90 forward half d64 dense", written=(1, 1), **others
) -> Kernel:
    """As figures.measure would describe a kernel with such a listing."""
    case = case_named(name)
    precision = case.variant.options.get("precision", "ieee")
    constants = {"M": 64, "N": 32, "DIM": 64, "DIM_V": 64, "PRECISION": precision}
    warps = 2 if case.arch == "gfx942" else 4
    launched = SimpleNamespace(__name__=f"{case.kind}_kernel", arg_names=["dk", "dv"])
    call = SimpleNamespace(
        kernel=launched,
        positional=written,
        constants=constants,
        config=SimpleNamespace(warps=warps),
    )
    given = {
        "case": case, "name": f"{case.kind}_kernel", "part": "", "main": True,
        "launched": "64x32 w4 s2", "registers": 100, "spilled": 0, "shared": 1024, "seconds": None,
        "loop": read_loop(case, call, listing),
    }  # fmt: skip
    return Kernel(**given | others)


def plain(*more: str, without: str = "nothing") -> str:
    """The clean loop with more in it."""
    kept = [line for line in CLEAN if without not in line]
    return sass(looped([*kept, *more], "0"), looped([*MASKED, *more], "1"), "EXIT ;")


def blackwell(listing: str) -> str:
    return re.sub(r"HGMMA\S+", "UTCHMMA", listing)


def test_a_clean_kernel_breaks_no_rule():
    found = kernel(plain())
    assert list(violations(found, Allowance())) == []
    assert found.loop.per_score == pytest.approx((3 * SCORES + 4) / SCORES)
    assert (found.loop.matrix, found.loop.exponentials) == (6, SCORES + 1)
    assert "HGMMA:6" in table.line(found)


def test_to_watch_for_infinities_is_no_mask():
    watching = plain(*["VIMNMX.U32 R3, R3, R24, !PT ;"] * 2 * SCORES)
    assert list(violations(kernel(watching), Allowance())) == []


def test_where_names_do_not_tell_the_shape_multiply_adds_are_counted():
    fresh = ["FFMA R2, R2, R3, R4 ;"] * 31 * SCORES
    constant = ["HFMA2.MMA R2, -RZ, RZ, 0, 0 ;"] * 2 * SCORES
    found = kernel(
        blackwell(plain(*fresh, *constant, *SOFTCAP)), "sm_100 forward half d64 modified"
    )
    assert list(violations(found, Allowance())) == []


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("HMMA.16816.F32.BF16", 16 * 8 * 16),
        ("HMMA.1688.F32.TF32", 16 * 8 * 8),
        ("HGMMA.64x128x16.F32.BF16", 16 * 128 * 16),
        ("v_mfma_f32_32x32x8_bf16", 32 * 32 * 8),
        ("v_mfma_f32_4x4x4_16b_f16", 4 * 4 * 4 * 16),
        ("FFMA", 0),
    ],
)
def test_a_matrix_instruction_tells_how_much_it_does(name, products):
    assert Instruction(name, "").products == products


def test_an_unrolled_kernel_is_counted_by_the_tile():
    once = kernel(plain()).loop
    unrolled = sass(looped([*CLEAN, *CLEAN], "0"), looped(CLEAN, "1"), "EXIT ;")
    twice = kernel(unrolled).loop
    assert (twice.tiles, twice.matrix) == (2, 12)
    assert twice.per_score == pytest.approx(once.per_score, abs=0.05)
    assert twice.bound.exponential == once.bound.exponential
    assert twice.bound.issue < once.bound.issue


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (kernel(plain(), spilled=8), "spills 8 bytes, 0 allowed"),
        (kernel(plain(), shared=(227 << 10) + 1), "bytes of shared memory"),
        (kernel(plain("LDG.E.128 R4, desc[UR4][R2.64] ;")), "loads tiles past"),
        (kernel(plain("LDG.E.U16 R4, desc[UR4][R2.64] ;")), "loads tiles past"),
        (kernel(plain("LDG.E R4, desc[UR4][R2.64] ;")), "loads 1 words past"),
        (kernel(plain("STS.U16 [R2], R4 ;")), "stores 1 numbers singly"),
        (kernel(plain("FSEL R24, R24, -INF , P2 ;")), "chooses between numbers 1 times"),
        (kernel(plain("FSETP.NEU.AND P2, PT, R3, R4, PT ;")), "chooses between numbers 1 times"),
        (kernel(plain(*["ISETP.GE.AND P2, PT, R3, R4, PT ;"] * 20)), "compares integers 21 times"),
        (
            kernel(plain(*["FADD R2, R2, R3 ;"] * 77)),
            "takes 8.06 instructions per score, 8 allowed",
        ),
        (kernel(plain(without="HGMMA")), "has no matrix instructions"),
        (kernel(plain(without="HGMMA.64x64x16")), "50% of the products are on them"),
        (
            kernel(
                blackwell(plain(*["FFMA R2, R2, R3, R4 ;"] * 32 * SCORES)),
                "sm_100 forward half d64 dense",
            ),
            "33 multiply-adds per score",
        ),
        (kernel(plain().replace("HGMMA.64x32x16", "HMMA.16816")), "multiplies by HMMA.16816"),
        (kernel(sass(looped(CLEAN[:3], "0"), "EXIT ;")), "has no loop"),
        (kernel(plain(), "sm_90 keys half d64 dense"), "the budget has no line of it"),
        (kernel(sass(looped(MASKED, "0"), "EXIT ;")), "chooses between numbers 16 times"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_rule_can_be_broken(changed, said):
    assert any(said in text for text in violations(changed, Allowance()))


def test_only_what_a_case_is_about_is_judged():
    listing = plain("LDG.E.128 R4, desc[UR4][R2.64] ;", *SOFTCAP)
    loaded = kernel(listing, "sm_90 forward half d64 modified")
    assert list(violations(loaded, Allowance())) == []
    float32 = kernel(plain("FSEL R24, R24, R25, P2 ;"), "sm_90 forward single d64 causal")
    assert list(violations(float32, Allowance(per_score=4.0))) == []
    helper = kernel(plain(), main=False, loop=None, spilled=4)
    assert list(violations(helper, Allowance())) == ["spills 4 bytes, 0 allowed"]


def test_the_budget_allows_a_backward_what_it_names():
    listing = plain("LDG.E R4, desc[UR4][R2.64] ;", *PRODUCTS)
    found = kernel(listing, "sm_90 keys half d64 dense", spilled=8)
    exact = Allowance(per_score=found.loop.per_score, spill=8, loads=1)
    assert list(violations(found, exact)) == []
    for name, less in (("per_score", 3.3), ("spill", 7), ("loads", 0)):
        assert len(list(violations(found, dataclasses.replace(exact, **{name: less})))) == 1


def test_no_budget_moves_a_limit_of_the_forward():
    generous = Allowance(per_score=100.0, spill=100, loads=100)
    found = kernel(plain("LDG.E R4, desc[UR4][R2.64] ;", *["FADD R2, R2, R3 ;"] * 80), spilled=8)
    assert len(list(violations(found, generous))) == 3


def test_a_conversion_to_bfloat16_is_no_mask():
    convert = ["v_cmp_o_f32_e32 vcc, v2, v2", "v_cndmask_b32_e32 v2, v3, v2, vcc"]
    body = [
        *["v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]"] * 16,
        *["v_exp_f32_e32 v1, v2", *convert] * SCORES,
    ]
    name, allowed = "gfx942 forward half d64 dense", Allowance(per_score=10.0)
    loop = amd(".LBB0_1:", *body, "s_cbranch_scc1 .LBB0_1", "s_endpgm")
    assert list(violations(kernel(loop, name), allowed)) == []
    other = "v_cmp_o_f32_e32 vcc, v2, v4"
    masked = amd(".LBB0_1:", *body, other, convert[1], "s_cbranch_scc1 .LBB0_1", "s_endpgm")
    found = list(violations(kernel(masked, name), allowed))
    assert found == ["chooses between numbers 1 times where nothing is hidden"]


def test_a_frame_that_nothing_is_stored_in_is_no_spill():
    usage = " Function kernel:\n  REG:255 STACK:24 SHARED:0 LOCAL:0 CONSTANT[0]:528 TEXTURE:0"
    assert spilled_bytes(usage, sass("STL [R1+0x4], R2 ;")) == 24
    assert spilled_bytes(usage, sass("STS [R1+0x4], R2 ;")) == 0
    segment = ".private_segment_fixed_size: 20"
    assert spilled_bytes_of_hip(amd("scratch_store_dword off, v2, off", segment)) == 20
    assert spilled_bytes_of_hip(amd("v_writelane_b32 v3, s2, 1", segment)) == 0


def test_what_a_compiler_says_is_cut_to_what_is_wrong():
    def refuse():
        os.write(2, b"a.py:1:2: error: too many registers\n#pages of it\n")
        raise RuntimeError("PassManager::run failed")

    with pytest.raises(DoesNotCompile, match=r"^too many registers$"), own_words():
        refuse()


def test_what_does_not_compile_is_a_violation(monkeypatch, capsys):
    import audit as command

    def refuse(case):
        raise DoesNotCompile("too many registers")

    monkeypatch.setattr(command, "measure", refuse)
    monkeypatch.setattr(sys, "argv", ["audit.py", "-j", "1", "sm_90 forward half d64 dense"])
    assert command.main() == 1
    said = "sm_90 forward half d64 dense: does not compile: too many registers"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("compiles", [True, False])
def test_what_compiles_may_be_all_that_is_asked(monkeypatch, capsys, compiles):
    import audit as command

    def build(call, arch):
        if not compiles and call.kernel.__name__ == "delta_kernel":
            raise DoesNotCompile("no such operation")

    monkeypatch.setattr(command, "build", build)
    names = ["sm_90 queries half d64 dense", "sm_90 keys half d64 dense"]
    monkeypatch.setattr(sys, "argv", ["audit.py", "-j", "1", "--compile-only", *names])
    assert command.main() == (not compiles)
    said = capsys.readouterr().out
    if compiles:
        assert "cases: 2 compile (3 kernels), 0 do not" in said
    else:
        assert "sm_90 queries half d64 dense: does not compile: no such operation" in said
        assert "cases: 1 compile (1 kernels), 1 do not" in said


def test_launches_of_their_own_for_dk_and_dv_are_told_apart():
    together = calls(case_named("sm_90 keys half d64 dense"))
    apart = calls(case_named("sm_90 keys half d256 dense"))
    assert [writes(call) for call in together] == [(True, True)]
    assert [writes(call) for call in apart] == [(True, False), (False, True)]
    name = "sm_90 keys half d64 dense"
    tensors = {"": (1, 1), "dk": (1, None), "dv": (None, 1)}
    clocks = {
        part: kernel(plain(), name, written=given).loop.bound.tensor
        for part, given in tensors.items()
    }
    assert clocks == {"": 256, "dk": 192, "dv": 128}
    assert [part_of(call) for call in [*together, *apart]] == ["", "dk", "dv"]


def test_the_bound_of_a_tile():
    """128x128, D=128 on an H100: 2048 clocks of tensor cores, 1024 of exponentials."""
    found = bound(CARDS["sm_90"], 4 * 128**3, 4096, 128 * 128, 8 * 512)
    assert (found.tensor, found.exponential, found.issue) == (2048, 1024, 1024)
    assert found.parallel == pytest.approx(989, abs=1)
    assert found.serial == pytest.approx(found.parallel / 2)


@pytest.mark.parametrize(
    ("name", "clocks"),
    [
        ("sm_90 forward half d64 dense", 128),
        ("sm_90 keys half d64 dense", 256),
        ("sm_90 queries half d64 dense", 192),
        ("sm_90 forward single d64 tf32", 256),
        ("sm_90 forward single d64 causal", 2048),
    ],
)
def test_what_the_products_of_a_tile_cost(name, clocks):
    """2, 4 or 3 products of 64x32x64."""
    assert kernel(plain(), name).loop.bound.tensor == clocks


def test_every_shipped_configuration_is_audited():
    audited = {
        Key(c.kind, family(c.arch), {"half": 2, "single": 4}[c.width], c.dim, c.variant.modified)
        for c in cases()
    }
    assert audited == {key for kind in PASSES for key in shipped(kind)}
    assert {family(case.arch) for case in cases()} == set(SHARED_BYTES)


@pytest.mark.parametrize(
    "name",
    [
        "sm_90 forward half d128 causal",
        "sm_89 keys half d64 modified",
        "gfx942 queries single d256 causal",
        "sm_80 decode half d64 grouped",
        "sm_100 decode single d128 modified",
    ],
)
def test_a_case_launches_what_its_configuration_says(name):
    case = case_named(name)
    call = calls(case)[-1]
    width = {"half": 2, "single": 4}[case.width]
    modified = case.variant.modified
    assert call.config is choose(case.kind, case.arch, width, case.dim, modified=modified)
    assert call.kernel.__name__ == f"{case.kind}_kernel"


def test_a_written_budget_is_what_was_measured(tmp_path):
    path, name = tmp_path / "budget.toml", "sm_90 keys half d64"
    loads = "LDG.E R4, desc[UR4][R2.64] ;"
    dense = kernel(plain(loads), f"{name} dense", spilled=8)
    causal = kernel(plain(), f"{name} causal")
    kept = Budget({("sm_80.half", "keys_d64"): Allowance(per_score=1.0)})
    found = budget.renewed(kept, [dense, causal])
    path.write_text(budget.text(found))
    assert budget.read(path) == found
    assert found.of(dense.case) == Allowance(per_score=3.32, spill=8, loads=1)
    assert path.read_text().endswith(
        "\n[sm_80.half]\nkeys_d64 = { per_score = 1.00 }\n"
        "\n[sm_90.half]\nkeys_d64 = { per_score = 3.32, spill = 8, loads = 1 }\n"
    )
    assert budget.renewed(kept, [dense]) == kept, "causal, of the same line, was not measured"


def test_what_a_budget_could_do_without():
    named, loads = "sm_90 keys half d64", "LDG.E R4, desc[UR4][R2.64] ;"
    kernels = [
        kernel(plain(loads), f"{named} dense", spilled=8),
        kernel(plain(), f"{named} causal", spilled=4),
    ]
    at, exact = ("sm_90.half", "keys_d64"), Allowance(per_score=3.32, spill=8, loads=1)
    assert list(budget.could_be_lower(Budget({at: exact}), kernels)) == []
    spilling = kernel(plain(), "sm_90 keys half d64 modified", spilled=8)
    assert list(budget.could_be_lower(Budget({}), [*kernels, spilling])) == []
    for name, more in (("per_score", 3.4), ("spill", 9), ("loads", 2)):
        generous = Budget({at: dataclasses.replace(exact, **{name: more})})
        [said] = budget.could_be_lower(generous, kernels)
        assert said.startswith(f"sm_90.half keys_d64: {name} is ")
        assert list(budget.could_be_lower(generous, kernels[:1])) == []


def test_the_budget_in_the_repository():
    """Has lines of what is audited alone, and reads as it would be written."""
    path = BENCH / "audit_budget.toml"
    assert budget.text(budget.read(path)) == path.read_text()


def test_a_budget_of_nothing_audited_is_refused(tmp_path):
    path = tmp_path / "budget.toml"
    path.write_text("[sm_90.half]\nkeys_d65 = { spill = 8 }\n")
    with pytest.raises(ValueError, match="keys_d65"):
        budget.read(path)


REAL = [
    "sm_90 forward half d64 dense",
    "sm_90 forward half d128 causal",
    "sm_90 queries half d64 dense",
    "sm_80 forward half d64 causal",
    "sm_100 forward half d64 dense",
    "gfx942 forward half d64 dense",
]


def run_audit(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, where triton compiles."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, BENCH / "audit.py", "-j", "1", *arguments],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )


@pytest.mark.timeout(1200)  # half a minute where nothing else runs
def test_real_kernels(tmp_path):
    """A part of `make audit`; then with a budget that allows nothing, which must fail."""
    done = run_audit(tmp_path / "cache", *REAL)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {name: row for row in done.stdout.splitlines() for name in REAL if row.startswith(name)}
    assert set(rows) == set(REAL)
    for name, matrix in (("sm_90", "HGMMA"), ("sm_80", "HMMA"), ("sm_100", "UTCHMMA")):
        assert all(f" {matrix}:" in row for case, row in rows.items() if case.startswith(name))
    strict = run_audit(tmp_path / "cache", "--budget", str(tmp_path / "none.toml"), REAL[2])
    assert strict.returncode == 1
    assert "the budget has no line of it" in strict.stdout
