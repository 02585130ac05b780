"""Token conventions that data and model share. May be imported anywhere."""

IGNORE = -100  # the target of padding, which does not count in any loss
