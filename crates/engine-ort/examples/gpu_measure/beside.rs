//! Another runtime in a process of its own. It reads lines of `MODEL BATCH RUNS`, and answers each
//! with a line of JSON: `{"ms": [..]}` or `{"error": ".."}`; before the first it says `{"name":
//! ".."}`.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::Deserialize;

use crate::Outcome;

pub struct Beside {
    pub name: String,
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

#[derive(Deserialize)]
pub struct Answer {
    #[serde(default)]
    name: String,
    #[serde(default)]
    ms: Vec<f64>,
    error: Option<String>,
}

impl Beside {
    pub fn start(command: &str) -> Outcome<Beside> {
        let mut words = command.split_whitespace();
        let program = words.next().ok_or("an empty command")?;
        let mut child = Command::new(program).args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take().ok_or("no pipe")?;
        let output = BufReader::new(child.stdout.take().ok_or("no pipe")?).lines();
        Ok(Beside { name: command.to_owned(), child, input, output })
    }

    /// Waits until the runtime is ready.
    pub fn greet(&mut self) -> Outcome<()> {
        let answer = self.answer()?;
        self.name = answer.name;
        Ok(())
    }

    /// The milliseconds of each run.
    pub fn runs(&mut self, model: &str, batch: usize, runs: usize) -> Outcome<Vec<f64>> {
        self.ask(model, batch, runs)?;
        Ok(self.answer()?.ms)
    }

    /// Sends a line. The caller must then call [`Beside::answer`].
    pub fn ask(&mut self, model: &str, batch: usize, runs: usize) -> Outcome<()> {
        writeln!(self.input, "{model} {batch} {runs}")?;
        Ok(self.input.flush()?)
    }

    pub fn answer(&mut self) -> Outcome<Answer> {
        let line = self.output.next().ok_or_else(|| format!("{} ended", self.name))??;
        let answer: Answer = serde_json::from_str(&line).map_err(|e| format!("{}: {e}: {line}", self.name))?;
        match answer.error {
            Some(error) => Err(format!("{}: {error}", self.name).into()),
            None => Ok(answer),
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
