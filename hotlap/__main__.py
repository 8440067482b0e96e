"""`python -m hotlap` is the `hotlap` command; torchrun starts it this way."""

from hotlap.cli import main

if __name__ == "__main__":
    main()
