"""Vector clocks: which work is ordered before which other work.

A *lane* does its work in the order in which it was issued: a stream of the device, or a thread of
the host. Work on two lanes is ordered only by what one lane waited for: `Lane.after` joins what
another lane had done and seen at some point. (Fidge 1988; Mattern 1989. Race detection with them:
Flanagan and Freund 2009, FastTrack, https://doi.org/10.1145/1542476.1542490.)
"""

Point = dict["Lane", int]  # lane → how much of its work is done; of a lane not named: nothing


class Lane:
    """A stream or a host thread. Its work is numbered from 1; `done` is the last number."""

    def __init__(self, name: str) -> None:
        self.name, self.done = name, 0
        self._seen: Point = {}  # of other lanes

    def advance(self) -> int:
        """Add one piece of work and return its number."""
        self.done += 1
        return self.done

    def seen(self, lane: "Lane") -> int:
        """The number of the last work of `lane` that is ordered before what this lane does next."""
        return self.done if lane is self else self._seen.get(lane, 0)

    def point(self) -> Point:
        """Everything that is ordered before what this lane does next."""
        return {**self._seen, self: self.done}

    def after(self, point: Point) -> None:
        """Order what this lane does next after `point`."""
        for lane, number in point.items():
            if lane is not self and number > self._seen.get(lane, 0):
                self._seen[lane] = number
