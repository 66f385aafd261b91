"""What training changes on a rank, and the step that changes it. What is around a step is in tpengine.runs."""
