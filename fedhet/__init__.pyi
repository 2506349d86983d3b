from fedhet.public_names import *  # noqa: F403
