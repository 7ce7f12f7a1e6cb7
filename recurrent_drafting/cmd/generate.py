"""`python -m recurrent_drafting.cmd.generate`: the published name of the generate job."""

from recurrent_drafting.generate import main

if __name__ == "__main__":
    main()
