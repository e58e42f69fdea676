"""Memory tasks with published numbers: `brt tasks`. A problem makes examples, the catalog says how they are trained."""
