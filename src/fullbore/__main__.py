"""`python -m fullbore`, the same as the command `fullbore`; torchrun starts ranks this way."""

from fullbore.cli.main import main

if __name__ == "__main__":
    main()
