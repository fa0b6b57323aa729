//! The counts of a request, and the file that holds the counts of every way.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::gate::ways::Way;

/// The beginning of the file.
const HEAD: &str = "# What a request costs on each way: means, by `just counts`. A change that raises one changes it here, by `just counts --write`, and says why in its message.\n\
                    # docs/results/speed.md says what each way is; lab/gate/src/main.rs what is counted and how.\n";

/// The counts of one request.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// Instructions, of all threads but the client's.
    pub instructions: f64,
    /// Allocations.
    pub allocations: f64,
    /// Their bytes.
    pub allocated_bytes: f64,
    /// Locks taken.
    pub locks: f64,
    /// Atomic instructions that read and write memory, those of locks included.
    pub atomics: f64,
    /// System calls.
    pub system_calls: f64,
    /// System calls that wait for a thread, or wake a thread.
    pub futex_calls: f64,
    /// Looks at a clock.
    pub clock_reads: f64,
    /// The number of times that a thread gave its core up to wait, for ways from process to
    /// process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_switches: Option<f64>,
}

impl Counts {
    /// Returns each count with its name, and whether it goes through the operating system.
    pub fn named(&self) -> Vec<(&'static str, f64, bool)> {
        let mut named = vec![
            ("instructions", self.instructions, false),
            ("allocations", self.allocations, false),
            ("allocated bytes", self.allocated_bytes, false),
            ("locks", self.locks, false),
            ("atomics", self.atomics, false),
            ("system calls", self.system_calls, true),
            ("futex calls", self.futex_calls, true),
            ("clock reads", self.clock_reads, false),
        ];
        named.extend(self.context_switches.map(|switches| ("context switches", switches, true)));
        named
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each: Vec<String> = self.named().iter().map(|(name, count, _)| format!("{count} {name}")).collect();
        f.write_str(&each.join(", "))
    }
}

/// The compiler of this program.
pub const RUSTC: &str = env!("DOWNBEAT_GATE_RUSTC");

/// The numbers of the tree, by way.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct CountsFile {
    /// The compiler whose code was counted.
    pub rustc: String,
    #[serde(flatten)]
    ways: BTreeMap<String, Counts>,
}

impl CountsFile {
    /// Reads the file; a missing file has no counts.
    ///
    /// # Errors
    /// If the file is malformed.
    pub fn read(path: &Path) -> Result<CountsFile> {
        match std::fs::read_to_string(path) {
            Ok(text) => toml::from_str(&text).with_context(|| format!("{}", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(CountsFile::default()),
            Err(error) => Err(error).with_context(|| format!("{}", path.display())),
        }
    }

    /// The counts of a way in the file.
    pub fn of(&self, way: Way) -> Option<&Counts> {
        self.ways.get(&way.name())
    }

    /// Sets the cost of a way.
    pub fn set(&mut self, way: Way, counts: Counts) {
        RUSTC.clone_into(&mut self.rustc);
        self.ways.insert(way.name(), counts);
    }

    /// Writes the file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = format!("{HEAD}\n{}", toml::to_string(self)?);
        std::fs::write(path, text).with_context(|| format!("{}", path.display()))
    }
}
