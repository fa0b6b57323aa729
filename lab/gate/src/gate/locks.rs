//! Finds the instructions that took a lock, or were atomic.
//!
//! The instruction itself shows this: the prefix `lock`, or an exchange with memory. A counting
//! variant of `driver::sync` would see only the driver's locks. This method sees the locks of every
//! crate, in the code that serves.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::gate::profile::Place;

/// The longest instruction of x86-64, bytes.
const LONGEST: usize = 15;

/// The files of locks' own code: parking_lot's, and the standard library's.
const LOCKS: [&str; 4] = ["/raw_mutex.rs:", "/raw_rwlock.rs:", "/sync/mutex/futex.rs:", "/sync/rwlock/futex.rs:"];

/// The function that an instruction is in, and the line.
struct Frame {
    function: String,
    line: String,
}

/// An atomic instruction that reads and writes memory.
pub struct Atomic {
    /// The number of times that it ran.
    pub count: i64,
    /// True if it takes a lock.
    pub is_lock: bool,
    /// The function of the program that it is in.
    pub function: String,
}

/// Finds the atomic instructions among the instructions that ran.
///
/// # Errors
/// If a program cannot be read, or `addr2line` of binutils is missing.
pub fn atomics(by_place: &BTreeMap<Place, i64>) -> Result<Vec<Atomic>> {
    let mut found = Vec::new();
    let objects: BTreeSet<&String> = by_place.keys().map(|(object, _)| object).collect();
    for object in objects {
        // Code that is in no file was made at run time.
        let Ok(bytes) = fs::read(object) else { continue };
        let segments = segments(&bytes).with_context(|| format!("{object} is no program"))?;
        let own = by_place.iter().filter(|((of, _), _)| of == object);
        let atomic: BTreeMap<u64, i64> = own
            .filter(|((_, address), count)| **count != 0 && is_atomic(instruction(&bytes, &segments, *address)))
            .map(|((_, address), count)| (*address, *count))
            .collect();
        let addresses: Vec<u64> = atomic.keys().copied().collect();
        let mut functions = functions_at(object, &addresses)?;
        found.extend(atomic.into_iter().map(|(address, count)| {
            let frames = functions.remove(&address).unwrap_or_default();
            let ours = frames.iter().find(|frame| frame.line.contains("/crates/")).or(frames.last());
            let function = ours.map(|frame| format!("{} ({})", frame.function, frame.line)).unwrap_or_default();
            Atomic { count, is_lock: frames.iter().any(takes), function }
        }));
    }
    Ok(found)
}

/// Returns true if a function takes a lock at once, instead of waiting for it or giving it back.
fn takes(frame: &Frame) -> bool {
    if !LOCKS.iter().any(|file| frame.line.contains(file)) {
        return false;
    }
    // As `<RawMutex as lock_api::RawMutex>::lock`, `Mutex::lock` or `lock<T>`.
    let name = match frame.function.strip_prefix('<') {
        Some(name) => name,
        None => frame.function.split('<').next().unwrap_or_default(),
    };
    let name = name.rsplit("::").next().unwrap_or_default();
    let takes = name.contains("lock") || matches!(name, "read" | "write" | "try_read" | "try_write");
    takes && !name.contains("unlock") && !name.contains("slow") && !name.contains("contended")
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

/// Returns true if an instruction reads and writes memory as one: it has the prefix `lock`, or is
/// an exchange with memory.
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

/// Returns, by address, the functions inlined there, the innermost first. The last one is the
/// function that they were inlined into.
fn functions_at(object: &str, addresses: &[u64]) -> Result<HashMap<u64, Vec<Frame>>> {
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
    let mut functions: HashMap<u64, Vec<Frame>> = HashMap::new();
    let text = String::from_utf8_lossy(&output.stdout);
    let (mut at, mut lines) = (0, text.lines());
    while let Some(line) = lines.next() {
        match line.strip_prefix("0x").and_then(|hex| u64::from_str_radix(hex, 16).ok()) {
            Some(address) => at = address,
            None => {
                let frame = Frame { function: line.to_owned(), line: lines.next().unwrap_or_default().to_owned() };
                functions.entry(at).or_default().push(frame);
            }
        }
    }
    Ok(functions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locked_and_exchanging_instructions_are_told_from_others() {
        // lock cmpxchg [rdi], ecx; lock xadd [rax], rcx behind a segment prefix; xchg [rdi], al;
        // xchg [rax], rcx.
        let atomic: [&[u8]; 4] =
            [&[0xf0, 0x0f, 0xb1, 0x0f], &[0x64, 0xf0, 0x48, 0x0f, 0xc1, 0x08], &[0x86, 0x07], &[0x48, 0x87, 0x08]];
        assert!(atomic.into_iter().all(is_atomic));
        // xchg rbx, rbx; mov; nothing.
        let plain: [&[u8]; 3] = [&[0x48, 0x87, 0xdb], &[0x48, 0x89, 0x08], &[]];
        assert!(!plain.into_iter().any(is_atomic));
    }

    #[test]
    fn locks_are_taken_by_functions_that_neither_wait_nor_give_back() {
        let takes = |function: &str, file: &str| takes(&Frame { function: function.to_owned(), line: file.to_owned() });
        let (mutex, std_mutex) = ("/parking_lot/src/raw_mutex.rs:66", "/std/src/sys/sync/mutex/futex.rs:30");
        assert!(takes("lock", mutex) && takes("<a::RawMutex as lock_api::mutex::RawMutex>::try_lock", mutex));
        assert!(takes("std::sys::sync::mutex::futex::Mutex::lock", std_mutex) && takes("lock<a::B>", std_mutex));
        assert!(!takes("unlock", mutex) && !takes("lock_slow", mutex) && !takes("lock", "/a/lock.rs:1"));
    }
}
