"""Makes the decisions of a log again, and says which ones come out otherwise.

    python -m benchmarks.scaling_replay LOG [--verbose]

LOG has one JSON value a line, as `ScalingPolicy.take_log` gives them: first settings, step times and limits, then each
decision with everything it was made from. Further headers (the policy was made anew) may follow. Exit status 1 where a
decision differs, 2 where the log cannot be read.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cluster.capacity import CapacityModel, PassTimes
from cluster.scaling import LOG_FORMAT, Decision, Inputs, capacity_model, decide
from cluster.settings import AutoscalingSettings
from cluster.step_time import StepCosts

_INPUTS = TypeAdapter(Inputs)
_DECISION = TypeAdapter(Decision)


@dataclass(frozen=True)
class Replayed:
    """One decision: what the log says, and what comes out now. `line`: from 1."""

    line: int
    inputs: Inputs
    logged: Decision
    again: Decision

    @property
    def differs(self) -> list[str]:
        """Names of the fields that differ."""
        fields = dataclasses.fields(Decision)
        return [one.name for one in fields if getattr(self.logged, one.name) != getattr(self.again, one.name)]


@dataclass(frozen=True)
class _Policy:
    settings: AutoscalingSettings
    model: CapacityModel | None
    passes: PassTimes | None


def replay(lines: Iterable[str], source: str = "log") -> Iterator[Replayed]:
    """Every decision of a log.

    Raises ValueError naming source, line and what is wrong with it.
    """
    policy: _Policy | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError("not a JSON object")
            if "format" in value:
                policy = _policy(value)
                continue
            if policy is None:
                raise ValueError("a decision before the settings: the log's beginning is missing")
            inputs = _INPUTS.validate_python(value["inputs"])
            logged = _DECISION.validate_python(value["decision"])
        except KeyError as error:
            raise ValueError(f"{source}, line {number}: missing key {error}") from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"{source}, line {number}: {_said(error)}") from error
        yield Replayed(number, inputs, logged, decide(inputs, policy.model, policy.settings, policy.passes))


def _policy(header: Mapping[str, Any]) -> _Policy:
    if header["format"] != LOG_FORMAT:
        raise ValueError(f"format is {header['format']!r}, this reads {LOG_FORMAT!r}")
    settings = AutoscalingSettings.model_validate(header["settings"])
    costs, passes = header["step_costs"], header["pass_times"]
    model = None if costs is None else capacity_model(settings, StepCosts.from_wire(costs), header["limits"])
    return _Policy(settings, model, None if passes is None else PassTimes.model_validate(passes))


def _said(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return str(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print every decision")
    args = parser.parse_args()
    num, num_different = 0, 0
    try:
        with args.log.open(encoding="utf-8") as lines:
            for one in replay(lines, str(args.log)):
                num += 1
                num_different += bool(one.differs)
                if args.verbose or one.differs:
                    drafter = "" if one.again.drafter is None else f", drafter {one.again.drafter}"
                    print(f"{one.inputs.now_s:.1f} s: target {one.again.target}{drafter}: {one.again.reason}")
                if one.differs:
                    print(f"  line {one.line} differs in {', '.join(one.differs)}; the log says: {one.logged.reason}")
    except (OSError, ValueError) as error:
        print(f"benchmarks.scaling_replay: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{num} decisions, {num_different} differ")
    sys.exit(1 if num_different else 0)


if __name__ == "__main__":
    main()
