"""The environments in the form that other people's trainers take."""
