"""What `make audit` is made of: what is compiled, what came of it, and what was allowed to.

cases        what is audited, and the calls that the backend would launch for it
compiling    a call -> machine code, without a GPU
disassembly  machine code -> instructions
loops        instructions -> the steady loop
bounds       what the clocks of a card allow
figures      all that is measured of one kernel
budget       what may be spent where no fixed limit says: audit_budget.toml
judging      figures, limits and budget -> violations
table        figures -> text
"""
