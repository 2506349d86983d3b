from fedhet.public_names import *
