//! A file of callgrind: the number of runs of each instruction, and the instructions of each
//! function with its callees.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Context as _, Result};

/// A place in a program or library: the file, and the address as in its symbols.
pub type Place = (String, u64);

/// The work of some threads in a part of a run.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// Instructions.
    pub total: i64,
    /// By instruction: how often it ran.
    pub by_place: BTreeMap<Place, i64>,
    /// By function: the instructions in it and in its callees.
    pub by_function: BTreeMap<String, i64>,
    /// By callee, by caller: the number of calls.
    pub calls: BTreeMap<String, BTreeMap<String, i64>>,
}

impl Profile {
    /// Reads a file of callgrind's, with positions that are addresses.
    ///
    /// # Errors
    /// If the text is no such file.
    pub fn read(text: &str) -> Result<Profile> {
        let mut reader = Reader::default();
        for (index, line) in text.lines().enumerate() {
            reader.read(line).with_context(|| format!("line {}: '{line}'", index + 1))?;
        }
        Ok(reader.profile)
    }

    /// Adds another thread's work, or subtracts it: `times` is 1 or -1.
    pub fn add(&mut self, other: &Profile, times: i64) {
        self.total += times * other.total;
        for (place, count) in &other.by_place {
            *self.by_place.entry(place.clone()).or_default() += times * count;
        }
        for (function, count) in &other.by_function {
            *self.by_function.entry(function.clone()).or_default() += times * count;
        }
        for (called, callers) in &other.calls {
            let own = self.calls.entry(called.clone()).or_default();
            for (caller, count) in callers {
                *own.entry(caller.clone()).or_default() += times * count;
            }
        }
    }
}

/// Names are written once, and are numbers from then on.
#[derive(Default)]
struct Names(HashMap<String, String>);

impl Names {
    fn of(&mut self, text: &str) -> Result<String> {
        let (number, name) = text.split_once(')').context("a name has a number")?;
        match name.trim_start() {
            "" => self.0.get(number).cloned().context("a number has a name"),
            name => {
                self.0.insert(number.to_owned(), name.to_owned());
                Ok(name.to_owned())
            }
        }
    }
}

#[derive(Default)]
struct Reader {
    profile: Profile,
    objects: Names,
    functions: Names,
    object: String,
    function: String,
    called: String,
    /// True if the next line gives the cost of a call.
    is_call: bool,
}

impl Reader {
    fn read(&mut self, line: &str) -> Result<()> {
        if let Some(hex) = line.strip_prefix("0x") {
            return self.read_cost(hex);
        }
        let Some((key, value)) = line.split_once('=') else { return Ok(()) };
        match key {
            "ob" => self.object = self.objects.of(value)?,
            "cob" => drop(self.objects.of(value)?),
            "fn" => self.function = self.functions.of(value)?,
            "cfn" => self.called = self.functions.of(value)?,
            "calls" => {
                self.is_call = true;
                let count: i64 = value.split(' ').next().unwrap_or_default().parse()?;
                let callers = self.profile.calls.entry(self.called.clone()).or_default();
                *callers.entry(self.function.clone()).or_default() += count;
            }
            _ => {}
        }
        Ok(())
    }

    fn read_cost(&mut self, text: &str) -> Result<()> {
        let (address, count) = text.split_once(' ').context("a count follows")?;
        let count: i64 = count.trim().parse()?;
        let of_function = match self.profile.by_function.get_mut(&self.function) {
            Some(of_function) => of_function,
            None => self.profile.by_function.entry(self.function.clone()).or_default(),
        };
        if std::mem::take(&mut self.is_call) {
            // A function that calls itself is counted once.
            *of_function += if self.called == self.function { 0 } else { count };
            return Ok(());
        }
        *of_function += count;
        self.profile.total += count;
        let place = (self.object.clone(), u64::from_str_radix(address, 16)?);
        *self.profile.by_place.entry(place).or_default() += count;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "positions: instr\nevents: Ir\nob=(1) /bin/a\nfl=(1) a.rs\nfn=(1) outer\n0x10 5\ncfn=(2) inner\n\
                        calls=5 0x20 \n0x14 50\n\nfn=(2)\n0x20 10\n0x24 40\n";

    #[test]
    fn what_a_function_calls_is_its_own_too_and_counted_once() {
        let profile = Profile::read(TEXT).unwrap();
        assert_eq!(profile.total, 55);
        assert_eq!((profile.by_function["outer"], profile.by_function["inner"]), (55, 50));
        assert_eq!(profile.calls["inner"]["outer"], 5);
        assert_eq!(profile.by_place[&("/bin/a".to_owned(), 0x24)], 40);
    }

    #[test]
    fn a_name_that_was_never_written_is_an_error() {
        assert!(Profile::read("fn=(7)\n").is_err());
    }
}
