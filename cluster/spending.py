"""What callers have used today, over all target replicas: for `callers.NAME.tokens_per_day`.

Enters: how many tokens each replica has charged to each caller since it started. Leaves: a `DaySpending`, which every
replica compares with the callers' budgets. A day is one of UTC. Never knows: Ray, budgets.
"""

from collections.abc import Sequence

import msgspec

from cluster.counts import TargetReport

DAY_S = 86400


class DaySpending(msgspec.Struct):
    """Tokens by caller on one day. `day`: its number since 1970."""

    day: int = 0
    tokens: dict[str, int] = {}

    def spent(self, caller: str, now_s: float) -> int:
        """Tokens of this caller on the day of `now_s` (`time.time`)."""
        return self.tokens.get(caller, 0) if self.day == now_s // DAY_S else 0


class SpendingTracker(msgspec.Struct):
    """Adds up what replicas report. `today`: what was used so far. `seen`: tokens by caller that each replica had
    reported last."""

    today: DaySpending = msgspec.field(default_factory=DaySpending)
    seen: dict[str, dict[str, int]] = {}

    def observe(self, reports: Sequence[TargetReport], now_s: float) -> None:
        """Take in what is new in some reports. What a replica used before this day, or before the first report of it
        that could be compared with an earlier one, is not counted: nobody knows on which day that was."""
        if (day := int(now_s // DAY_S)) != self.today.day:
            names = {report.replica for report in reports}
            self.today, self.seen = DaySpending(day, {}), {name: self.seen[name] for name in names & self.seen.keys()}
        tokens = self.today.tokens
        for report in reports:
            began_today = report.uptime_s < now_s % DAY_S
            before = self.seen.get(report.replica, {} if began_today else report.spent)
            for caller, number in report.spent.items():
                tokens[caller] = tokens.get(caller, 0) + max(0, number - before.get(caller, 0))
            self.seen[report.replica] = dict(report.spent)
