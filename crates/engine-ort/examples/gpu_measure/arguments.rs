//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use crate::{Outcome, STEPS};

pub struct Arguments {
    pub step: String,
    pub models: Vec<String>,
    zoo: PathBuf,
    pub batches: Vec<usize>,
    pub segments: usize,
    /// How long each model, or the step, may take.
    pub time: Duration,
    /// Commands of other runtimes, which answer as `plain` does.
    pub beside: Vec<String>,
    /// The file of samples.
    pub samples: Option<PathBuf>,
}

impl Arguments {
    pub fn parse(mut words: impl Iterator<Item = String>) -> Outcome<Arguments> {
        let mut parsed = Arguments {
            step: words.next().ok_or_else(|| format!("say which step: {STEPS}"))?,
            models: Vec::new(),
            zoo: "target/zoo".into(),
            batches: vec![1, 2, 4, 8, 16, 32, 64],
            segments: 8,
            time: Duration::from_secs(20),
            beside: Vec::new(),
            samples: None,
        };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
            match word.as_str() {
                "--zoo" => parsed.zoo = value()?.into(),
                "--batches" => parsed.batches = value()?.split(',').map(str::parse).collect::<Result<_, _>>()?,
                "--segments" => parsed.segments = value()?.parse()?,
                "--seconds" => parsed.time = Duration::from_secs_f64(value()?.parse()?),
                "--beside" => parsed.beside.push(value()?),
                "--samples" => parsed.samples = Some(value()?.into()),
                flag if flag.starts_with('-') => return Err(format!("there is no flag {flag}").into()),
                _ => parsed.models.push(word),
            }
        }
        Ok(parsed)
    }

    /// The file of a model.
    pub fn path(&self, model: &str) -> PathBuf {
        self.zoo.join(model).join("1/model.onnx")
    }
}
