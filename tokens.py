"""What data and model must agree on about tokens. May be imported anywhere."""

IGNORE = -100  # a target that no loss counts: padding
