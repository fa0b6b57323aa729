//! The pages of a program's own code that the process has in its memory.

use std::ffi::c_void;
use std::path::Path;

use rustix::mm::{Advice, madvise};

/// A part of the address space.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapping {
    from: usize,
    bytes: usize,
}

/// Gives up the pages of this program's code and constants. Most of this code runs at the start
/// alone. The kernel keeps the pages in its cache, and maps a page again when the process touches
/// it. Without the right files in `/proc` this does nothing.
pub fn release_code() {
    let Ok(program) = std::fs::read_link("/proc/self/exe") else { return };
    let Ok(smaps) = std::fs::read_to_string("/proc/self/smaps") else { return };
    for Mapping { from, bytes } in untouched(&smaps, &program) {
        // SAFETY: the mapping is of a file, private, not writable, and has no page of its own. A
        // page that is given up has the bytes of the file, and is read from there again.
        // An error means that the pages stay.
        let _ = unsafe { madvise(std::ptr::with_exposed_provenance_mut::<c_void>(from), bytes, Advice::LinuxDontNeed) };
    }
}

/// The mappings of the program's file that are not writable and have no page that differs from the
/// file, by the text of `/proc/self/smaps`. Pages that the loader has relocated differ from the
/// file.
fn untouched(smaps: &str, program: &Path) -> Vec<Mapping> {
    let mut found = Vec::new();
    let mut of_program = None;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some((from, to)) = first.split_once('-') {
            let may = words.next().unwrap_or_default();
            let is_programs = line.split_once('/').is_some_and(|(_, path)| Path::new("/").join(path) == program);
            let number = |text| usize::from_str_radix(text, 16).ok();
            let mapping = number(from).zip(number(to));
            let mapping = mapping.and_then(|(from, to)| Some(Mapping { from, bytes: to.checked_sub(from)? }));
            of_program = mapping.filter(|_| is_programs && may.starts_with("r-") && may.ends_with('p'));
        } else if first == "Anonymous:"
            && words.next() == Some("0")
            && let Some(mapping) = of_program.take()
        {
            found.push(mapping);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
5000-7000 r--p 00000000 fe:00 12 /usr/bin/down beat
Size:                  8 kB
Anonymous:             0 kB
7000-a000 r-xp 00002000 fe:00 12 /usr/bin/down beat
Anonymous:             0 kB
a000-b000 r--p 00005000 fe:00 12 /usr/bin/down beat
Anonymous:             4 kB
b000-c000 rw-p 00006000 fe:00 12 /usr/bin/down beat
Anonymous:             0 kB
c000-d000 r-xp 00000000 fe:00 13 /usr/lib/libc.so.6
Anonymous:             0 kB
d000-e000 r--p 00000000 00:00 0
Anonymous:             0 kB
nonsense-e r-xp x
Anonymous:             0 kB
";

    #[test]
    fn only_pages_that_are_those_of_the_file_are_given_up() {
        let found = untouched(SMAPS, Path::new("/usr/bin/down beat"));
        assert_eq!(found, [Mapping { from: 0x5000, bytes: 0x2000 }, Mapping { from: 0x7000, bytes: 0x3000 }]);
        assert_eq!(untouched(SMAPS, Path::new("/usr/bin/other")), []);
    }

    #[test]
    fn a_program_goes_on_without_its_pages() {
        let text = |values: &[u32]| format!("{values:?}");
        let before = text(&[1, 2, 3]);
        release_code();
        assert_eq!(text(&[1, 2, 3]), before);
    }
}
