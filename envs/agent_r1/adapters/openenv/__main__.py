"""`python -m agent_r1.adapters.openenv ID --out FOLDER`."""

from agent_r1.adapters.openenv.folder import main

if __name__ == "__main__":
    main()
