"""What the learners share, a file a job; each begins with a line about it.

Before    startup tells in a line what is missing
A run     run begins it, with arguments, environments, sources, loading, foreign, model_checks, preflight and threads
          (cgroups), curriculum and pass_rates; streams has its random numbers, logger and metrics what it shows
Sampling  engine is the contract, make_engine chooses: transformers_engine (slots, slot_cache, graphs), vllm_engine,
          vllm_client (vllm_replies), chat_engine; rollout plays episodes with one
Training  trajectory is the row that all work on; returns, kl and forward compute, optimizer steps, deterministic
          replaces kernels that aren't; distributed is several processes
On disk   run_files and evaluation_files write, checkpoint goes on, earlier_runs reads, signals and disk end it well
Imitation demonstrations are rows to imitate, scratch makes a small model
Many runs benchmark runs them, compare draws their curves, intervals says how sure a figure is
"""
