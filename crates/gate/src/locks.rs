//! Which of the instructions that ran take a lock, or are atomic.
//!
//! A processor's instruction says so itself: `lock`, or an exchange with memory. So locks of all crates are counted, not of those that a counting variant was written for, and the
//! code that is counted is the code that serves.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::profile::Place;

/// The longest instruction of x86-64, bytes.
const LONGEST: usize = 15;

/// Functions that take a lock, inlined or not, as their names end: of parking_lot and of the standard library. `unlock` is none of them.
const TAKES: [&str; 9] = [
    "RawMutex as lock_api::mutex::RawMutex>::lock",
    "RawMutex as lock_api::mutex::RawMutex>::try_lock",
    "RawRwLock as lock_api::rwlock::RawRwLock>::lock_shared",
    "RawRwLock as lock_api::rwlock::RawRwLock>::lock_exclusive",
    "RawRwLock as lock_api::rwlock::RawRwLock>::try_lock_shared",
    "RawRwLock as lock_api::rwlock::RawRwLock>::try_lock_exclusive",
    "futex::Mutex::lock",
    "futex::Mutex::try_lock",
    "futex::RwLock::read",
];

/// How often places ran that are atomic, and of these those that take a lock.
#[derive(Clone, Copy, Debug, Default)]
pub struct Atomics {
    /// Atomic instructions that read and write.
    pub all: i64,
    /// Locks taken.
    pub locks: i64,
}

/// Finds them in what ran.
///
/// # Errors
/// If a program cannot be read, or binutils' `addr2line` is not there.
pub fn atomics(by_place: &BTreeMap<Place, i64>) -> Result<Atomics> {
    let mut found = Atomics::default();
    let objects: BTreeSet<&String> = by_place.keys().map(|(object, _)| object).collect();
    for object in objects {
        // What is in no file was made as it ran.
        let Ok(bytes) = fs::read(object) else { continue };
        let segments = segments(&bytes).with_context(|| format!("{object} is no program"))?;
        let own = by_place.iter().filter(|((of, _), _)| of == object);
        let atomic: Vec<(u64, i64)> = own
            .filter(|((_, address), count)| **count != 0 && is_atomic(instruction(&bytes, &segments, *address)))
            .map(|((_, address), count)| (*address, *count))
            .collect();
        found.all += atomic.iter().map(|(_, count)| count).sum::<i64>();
        let addresses: Vec<u64> = atomic.iter().map(|(address, _)| *address).collect();
        let functions = functions_at(object, &addresses)?;
        let takes = |address: &u64| functions.get(address).is_some_and(|names| names.iter().any(|name| takes(name)));
        found.locks += atomic.iter().filter(|(address, _)| takes(address)).map(|(_, count)| count).sum::<i64>();
    }
    Ok(found)
}

fn takes(function: &str) -> bool {
    TAKES.iter().any(|name| function.ends_with(name))
}

/// A part of a file that is loaded: its address, where it is in the file, and how long.
type Segment = (u64, u64, u64);

/// The loaded parts of a 64-bit ELF file.
fn segments(bytes: &[u8]) -> Option<Vec<Segment>> {
    const LOAD: u32 = 1;
    let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let half = |at: usize| Some(usize::from(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?)));
    let (table, size, number) = (word(32)? as usize, half(54)?, half(56)?);
    let mut segments = Vec::new();
    for header in (0..number).map(|index| table + index * size) {
        if word(header)? as u32 == LOAD {
            segments.push((word(header + 16)?, word(header + 8)?, word(header + 32)?));
        }
    }
    (bytes.get(..5)? == b"\x7fELF\x02").then_some(segments)
}

fn instruction<'a>(bytes: &'a [u8], segments: &[Segment], address: u64) -> &'a [u8] {
    let inside = |(begin, _, length): &&Segment| (*begin..begin + length).contains(&address);
    let Some((begin, place, _)) = segments.iter().find(inside) else { return &[] };
    let at = (address - begin + place) as usize;
    bytes.get(at..bytes.len().min(at + LONGEST)).unwrap_or_default()
}

/// Whether an instruction reads and writes memory as one: it has the prefix `lock`, or is an exchange with memory.
fn is_atomic(instruction: &[u8]) -> bool {
    const LOCK: u8 = 0xf0;
    let is_prefix = |byte: &&u8| matches!(byte, 0x66 | 0x67 | 0xf2 | 0xf3 | 0x2e | 0x36 | 0x3e | 0x26 | 0x64 | 0x65);
    let prefixes = instruction.iter().take_while(is_prefix).count();
    let rest = &instruction[prefixes..];
    let code = match rest {
        [LOCK, ..] => return true,
        // REX, before the code.
        [0x40..=0x4f, code @ ..] => code,
        code => code,
    };
    matches!(code, [0x86 | 0x87, operands, ..] if operands >> 6 != 3)
}

/// By address: the function that it is in, with those that were inlined there.
fn functions_at(object: &str, addresses: &[u64]) -> Result<HashMap<u64, Vec<String>>> {
    let mut tool = Command::new("addr2line")
        .args(["--exe", object, "--functions", "--inlines", "--demangle", "--addresses"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("addr2line does not start; it comes with the linker (on Debian: apt-get install binutils)")?;
    let asked: String = addresses.iter().map(|address| format!("{address:#x}\n")).collect();
    let mut input = tool.stdin.take().context("it is piped")?;
    let writer = std::thread::spawn(move || input.write_all(asked.as_bytes()));
    let output = tool.wait_with_output()?;
    let _ = writer.join();
    ensure!(output.status.success(), "addr2line cannot read {object}");
    let mut functions: HashMap<u64, Vec<String>> = HashMap::new();
    let mut at = 0;
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        match line.strip_prefix("0x").and_then(|hex| u64::from_str_radix(hex, 16).ok()) {
            Some(address) => at = address,
            // Functions and lines of files in turn; no function's name has what a line ends in.
            None => functions.entry(at).or_default().push(line.to_owned()),
        }
    }
    Ok(functions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locked_and_exchanging_instructions_are_told_from_others() {
        // lock cmpxchg [rdi], ecx; lock xadd [rax], rcx behind a segment prefix; xchg [rdi], al; xchg [rax], rcx.
        let atomic: [&[u8]; 4] =
            [&[0xf0, 0x0f, 0xb1, 0x0f], &[0x64, 0xf0, 0x48, 0x0f, 0xc1, 0x08], &[0x86, 0x07], &[0x48, 0x87, 0x08]];
        assert!(atomic.into_iter().all(is_atomic));
        // xchg rbx, rbx; mov; nothing.
        let plain: [&[u8]; 3] = [&[0x48, 0x87, 0xdb], &[0x48, 0x89, 0x08], &[]];
        assert!(!plain.into_iter().any(is_atomic));
    }
}
