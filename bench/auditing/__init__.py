"""What `make audit` is made of: what is compiled, what came of it, and what was allowed to.

    cases        what is audited, and the calls that the backend would launch for it
    compiling    a call -> machine code, without a GPU
    disassembly  machine code -> instructions, and the steady loop among them
    bounds       what a card can do in a clock, and what follows for a tile
    figures      all that is measured of one kernel
    budget       what may be spent beyond the fixed limits: budget.toml
    judging      figures and budget -> violations
"""
