"""The recorders: a lowered program at one int_key -> schema.Recording.

*capture* takes a captured CUDA graph apart (needs the GPU):

    capture.py    record(): the parent, whose processes do the work
    processes.py  start recorder processes, bring back results and refusals
    request.py    what a process is asked to do
    child.py      entry of a process: CUPTI first, then torch
    session.py    load, place, lower, warm up, capture
    take.py       everything one process saw, as rows.py's plain data
    cupti.py      kernel images by module; elf.py reads them; state.py compares their variables
    walk.py       graph nodes by the driver API; addresses.py reads addresses; driver.py the calls
    pairing.py, relocate.py, memory.py, assemble.py
                  pure: two takes -> recordings, tables, arena
"""
