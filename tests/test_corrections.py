"""Corrections of a step-time table: they travel, engines are combined, old ones end, and bad ones are refused."""

import json
import math

import pytest

from cluster.step_time import (
    MAX_KINDS,
    MAX_LOG_FACTOR,
    NO_GRAPH,
    CorrectedTimes,
    Corrections,
    Factor,
    LiveCosts,
    Residuals,
    StepShape,
    combined,
)
from tests.step_tables import Table

TABLE = Table(7, full_graph_depths=frozenset({3, 7}))
AT_3, AT_7, RAGGED = StepShape.uniform(1, 3), StepShape.uniform(1, 7), StepShape(4, 9, None)
MANY = 5000.0


def engine(**kinds: tuple[float, float]) -> Corrections:
    """`k7=(1.1, 500)`: one request on the full graph of 7 takes 1.1 times the table's seconds, in 500 steps."""
    return Corrections({(0, int(name[1:])): Factor(math.log(one), num) for name, (one, num) in kinds.items()})


def factor(corrections: Corrections, shape: StepShape) -> float:
    return CorrectedTimes(TABLE, corrections).seconds(shape) / TABLE.seconds(shape)


def test_a_value_corrects_as_the_residuals_it_was_taken_from() -> None:
    residuals = Residuals(TABLE.full_graph_depths)
    for _ in range(700):
        residuals.observe(0.012, 0.010, AT_7)
        residuals.observe(0.009, 0.010, RAGGED)
    for corrections in (residuals.corrections(), Corrections.decode(residuals.corrections().encode())):
        for shape in (AT_3, AT_7, RAGGED):
            assert factor(corrections, shape) == pytest.approx(residuals.correct(1.0, shape), rel=1e-4)
    assert factor(residuals.corrections(), AT_7) > 1.1 > factor(residuals.corrections(), AT_3)


def test_a_value_does_not_move_on_with_the_residuals() -> None:
    residuals = Residuals(TABLE.full_graph_depths)
    before = residuals.corrections()
    residuals.observe(0.020, 0.010, AT_7)
    assert before == Corrections()
    assert residuals.corrections() != before


def test_the_text_is_small() -> None:
    """All that an engine of 256 requests and 8 full graphs can say, at most twice a second."""
    kinds = {(bucket, depth): Factor(-0.123456, 1e6) for bucket in range(9) for depth in range(NO_GRAPH, 8)}
    assert len(Corrections(kinds).encode()) < 2000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read"),
        ("[[0.1,", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        (None, "cannot be read"),
        ("{}", "rows is expected"),
        ("7", "rows is expected"),
        (json.dumps([[0, 1, 0, 1]] * (MAX_KINDS + 1)), "rows is expected"),
        ("[7]", "a row is"),
        ("[[0,7,0.1]]", "a row is"),
        ("[[0,true,0.1,5]]", "a row is"),
        ("[[0,7.5,0.1,5]]", "a row is"),
        ('[[0,7,"a",5]]', "a factor is"),
        ("[[0,7,null,5]]", "a factor is"),
        ("[[0,7,true,5]]", "a factor is"),
        ("[[0,7,NaN,5]]", "a factor is"),
        ("[[0,7,0.1,Infinity]]", "a factor is"),
        ("[[0,7,0.1,-1]]", "a factor is"),
        ("[[0,7,2.2,5]]", "a factor is"),
        ("[[0,7,-2.2,5]]", "a factor is"),
        (f"[[0,7,{'9' * 400},5]]", "a factor is"),
        ("[[-1,7,0.1,5]]", "no bucket -1"),
        ("[[0,-2,0.1,5]]", "depth -2"),
        ("[[0,65,0.1,5]]", "depth 65"),
    ],
)
def test_what_no_engine_writes_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"corrections: .*{said}"):
        Corrections.decode(text)


def test_the_greatest_factor_survives_its_rounding() -> None:
    extreme = Corrections({(0, 3): Factor(MAX_LOG_FACTOR, 5), (0, 7): Factor(-MAX_LOG_FACTOR, 5)})
    found = Corrections.decode(extreme.encode()).kinds
    assert [found[0, k].log_factor for k in (3, 7)] == pytest.approx([MAX_LOG_FACTOR, -MAX_LOG_FACTOR], abs=1e-4)


def test_what_no_step_has_visited_takes_the_common_factor() -> None:
    """One kind that is off by what single points err says little of the others; several, or one far off, say it."""
    assert Corrections().common == 0.0
    once = engine(k7=(1.08, MANY))
    assert 1.03 < factor(once, AT_3) < 1.06
    often = Corrections({(bucket, 7): Factor(math.log(1.08), MANY) for bucket in range(6)})
    assert factor(often, AT_3) == pytest.approx(1.08, abs=0.01)
    far = engine(k7=(2.0, MANY))
    assert factor(far, AT_3) == pytest.approx(2.0, rel=0.02)
    assert factor(engine(k7=(1.08, 1)), AT_3) < 1.01


def test_one_engine_is_itself_and_none_is_no_correction() -> None:
    for num_steps in (40, MANY):
        alone = engine(k3=(1.1, MANY), k7=(1.3, num_steps))
        for shape in (AT_3, AT_7, RAGGED):
            assert factor(combined([alone]), shape) == pytest.approx(factor(alone, shape))
        assert combined([alone, Corrections(), engine(k7=(1.0, 0))]) == combined([alone])
    assert combined([]) == combined([Corrections()]) == Corrections()


def test_engines_count_by_their_steps_and_none_drowns_the_others() -> None:
    def at_7(*engines: Corrections) -> float:
        common = [math.exp(one.common) for one in engines]
        assert min(common) < math.exp(combined(engines).common) < max(common)
        return factor(combined(engines), AT_7)

    fair = at_7(engine(k7=(1.1, 200)), engine(k7=(1.4, 200)))
    assert fair == pytest.approx(math.sqrt(1.1 * 1.4), rel=0.03)
    assert at_7(engine(k7=(1.1, 200)), engine(k7=(1.4, 20))) < fair - 0.05
    assert at_7(engine(k7=(1.1, 1e9)), engine(k7=(1.4, MANY))) == pytest.approx(math.sqrt(1.1 * 1.4), rel=0.01)


def test_a_slow_engine_does_not_make_its_depths_look_slow() -> None:
    """The slow one alone runs K = 7, and is as slow at all else; the other alone K = 3."""
    everywhere = {(bucket, 7): Factor(math.log(1.3), MANY) for bucket in range(5)}
    usual = {(bucket, 3): Factor(0.0, MANY) for bucket in range(5)}
    both = combined([Corrections(everywhere), Corrections(usual)])
    assert factor(both, AT_7) / factor(both, AT_3) == pytest.approx(1.0, abs=0.015)
    assert factor(both, AT_7) == pytest.approx(math.sqrt(1.3), rel=0.02)
    one_is_slow = combined([engine(k7=(1.2, MANY), k3=(1.32, MANY)), engine(k7=(1.0, MANY), k3=(1.1, MANY))])
    assert factor(one_is_slow, AT_3) / factor(one_is_slow, AT_7) == pytest.approx(1.1, rel=0.01)


def test_no_factor_of_several_is_beyond_eight() -> None:
    ends = [Corrections({(0, 7): Factor(MAX_LOG_FACTOR, MANY), (0, 3): Factor(-MAX_LOG_FACTOR, MANY)})]
    ends.append(Corrections({(bucket, 3): Factor(MAX_LOG_FACTOR, MANY) for bucket in range(1, 9)}))
    assert combined(ends).kinds[0, 7].log_factor == MAX_LOG_FACTOR
    assert factor(combined(ends), AT_7) <= 8.0 + 1e-9


def test_the_last_word_of_an_engine_ends_with_its_age() -> None:
    live = LiveCosts(TABLE, max_age_s=30.0)
    plain = live.curves
    assert live.take({"a": engine(k7=(1.2, MANY)), "b": engine(k7=(1.4, MANY))}, 100.0)
    both_s = live.curves.curve(1, 0.0).uniform[7]
    assert both_s == pytest.approx(TABLE.seconds(AT_7) * math.sqrt(1.2 * 1.4), rel=0.02)
    assert not live.take({"a": engine(k7=(1.2, MANY))}, 129.0)  # b is gone, and still remembered
    assert live.take({"a": engine(k7=(1.2, MANY))}, 131.0)
    assert live.curves.curve(1, 0.0).uniform[7] == pytest.approx(TABLE.seconds(AT_7) * 1.2, rel=0.02)
    assert live.document()["num_engines"] == 1
    assert live.take({}, 200.0)
    assert live.curves.curve(1, 0.0).uniform == plain.curve(1, 0.0).uniform
    assert live.document() == {"num_engines": 0, "others": 1.0, "steps": []}


def test_a_clock_that_goes_back_forgets_what_it_has_not_heard_since() -> None:
    live = LiveCosts(TABLE, max_age_s=30.0)
    live.take({"a": engine(k7=(1.3, MANY))}, 1000.0)
    assert live.take({"b": engine(k3=(1.0, MANY))}, 10.0)
    assert live.document()["num_engines"] == 1
    assert [(one["depth"], one["factor"]) for one in live.document()["steps"]] == [(3, 1.0)]


def test_costs_stay_the_same_object_until_they_move() -> None:
    """Curves are remembered, and cost a millisecond each to make."""
    live = LiveCosts(TABLE, max_age_s=30.0)
    assert live.take({"a": engine(k7=(1.2, 400))}, 0.0)
    curves = live.curves
    for now_s in range(1, 20):
        assert not live.take({"a": engine(k7=(1.2 + 1e-4 * now_s, 400 + now_s))}, float(now_s))
    assert live.curves is curves
    assert live.take({"a": engine(k7=(1.25, 400))}, 20.0)
    assert live.curves is not curves


def test_the_document_says_each_factor_in_use() -> None:
    live = LiveCosts(TABLE, max_age_s=30.0)
    found = {(2, NO_GRAPH): Factor(math.log(0.9), 200), (0, 7): Factor(math.log(1.2), 100)}
    corrections = Corrections(found)
    live.take({"a": corrections}, 0.0)
    ragged, full = json.loads(json.dumps(live.document()))["steps"]
    assert (ragged["depth"], ragged["requests"], ragged["num_steps"]) == (None, 4, 200)
    assert (full["depth"], full["requests"]) == (7, 1)
    assert full["factor"] == pytest.approx(factor(corrections, AT_7), abs=1e-3)
    assert 1.1 < full["factor"] < 1.2, "as far as 100 steps are trusted"
    assert live.document()["others"] == pytest.approx(math.exp(corrections.common), abs=1e-3)
