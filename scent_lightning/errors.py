"""The exceptions of this package."""


class InputError(ValueError):
    """A setting or a data file that cannot be used; the message is one sentence and names what is wrong.

    The command line prints it without a traceback.
    """


class DivergenceError(RuntimeError):
    """Training has left the finite numbers.

    The command line prints it without a traceback and exits with code 1.
    """


class DualDivergenceError(DivergenceError):
    """Raised before anything is written when a step would leave a dual variable or its objective non-finite.

    Attributes:
        dual: name of the dual variable.
        update: the dual update, as it prints.
        num_anchors: how many rows of the batch (of all ranks) are affected.
        first_index: dataset index of the first of them.
    """

    def __init__(self, dual: str, update: str, num_anchors: int, first_index: int, cause: str, hint: str) -> None:
        super().__init__(
            f"dual variable {dual!r} with {update} diverged: {cause} for {num_anchors} anchor(s), first at index "
            f"{first_index}; its table keeps the values it had before this batch. {hint}"
        )
        self.dual = dual
        self.update = update
        self.num_anchors = num_anchors
        self.first_index = first_index
