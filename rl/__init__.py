"""Reinforcement learning and supervised fine-tuning: the loop and what it is made of."""
