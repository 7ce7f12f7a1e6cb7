"""`python -m recurrent_drafting.cmd.generate`: the published tool's name and flags for the job in
recurrent_drafting/generate.py.
"""

from recurrent_drafting.generate import main

if __name__ == "__main__":
    main()
