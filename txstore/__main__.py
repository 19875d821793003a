"""``python -m txstore``: the console script, for where its folder is not on the path."""

from txstore.cli import main

if __name__ == "__main__":
    main()
