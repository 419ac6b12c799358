"""`python -m uniml_rl` is the `uniml-rl` command; launchers such as torchrun start it by this name."""

from uniml_rl.cli import main

if __name__ == "__main__":
    main()
