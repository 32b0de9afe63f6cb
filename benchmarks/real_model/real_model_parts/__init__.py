"""What benchmarks/real_model/real_model.py is made of, a job a file."""
