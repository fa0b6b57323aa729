//! A set of CPUs, by the numbers that the kernel gives them.

use std::fmt;
use std::str::FromStr;

/// Bits of a word.
const WORD: usize = u64::BITS as usize;

/// A set of CPUs, by the numbers that the kernel gives them. Each hyperthread of a core is a CPU.
/// The text form is the kernel's: `0-3,8-11`.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CoreSet {
    words: [u64; CoreSet::LIMIT / WORD],
}

/// A text that is not a list of CPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}; expected CPU numbers such as \"0\", \"0-3\" or \"0-3,8-11\"")]
pub struct NotACoreSet {
    reason: String,
}

impl CoreSet {
    /// CPUs have numbers below this, as for the C library (`CPU_SETSIZE`).
    pub const LIMIT: usize = 1024;

    /// Adds the CPU to the set. Numbers from [`CoreSet::LIMIT`] on are ignored.
    pub fn insert(&mut self, cpu: usize) {
        if let Some(word) = self.words.get_mut(cpu / WORD) {
            *word |= 1 << (cpu % WORD);
        }
    }

    /// Whether the set has the CPU.
    pub fn contains(&self, cpu: usize) -> bool {
        self.words.get(cpu / WORD).is_some_and(|word| word & (1 << (cpu % WORD)) != 0)
    }

    /// The number of CPUs.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        *self == CoreSet::default()
    }

    /// The CPUs, in their order.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        (0..CoreSet::LIMIT).filter(|cpu| self.contains(*cpu))
    }

    /// The CPUs of either set.
    #[must_use]
    pub fn with(self, other: CoreSet) -> CoreSet {
        self.zip(other, |a, b| a | b)
    }

    /// The CPUs of both sets.
    #[must_use]
    pub fn common(self, other: CoreSet) -> CoreSet {
        self.zip(other, |a, b| a & b)
    }

    /// The CPUs of this set that the other lacks.
    #[must_use]
    pub fn without(self, other: CoreSet) -> CoreSet {
        self.zip(other, |a, b| a & !b)
    }

    fn zip(mut self, other: CoreSet, join: impl Fn(u64, u64) -> u64) -> CoreSet {
        for (word, other) in self.words.iter_mut().zip(other.words) {
            *word = join(*word, other);
        }
        self
    }
}

impl FromIterator<usize> for CoreSet {
    fn from_iter<I: IntoIterator<Item = usize>>(cpus: I) -> CoreSet {
        let mut set = CoreSet::default();
        cpus.into_iter().for_each(|cpu| set.insert(cpu));
        set
    }
}

impl fmt::Display for CoreSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let begins = |cpu: &usize| *cpu == 0 || !self.contains(cpu - 1);
        for (place, first) in self.iter().filter(begins).enumerate() {
            let comma = if place == 0 { "" } else { "," };
            let last = (first..CoreSet::LIMIT).take_while(|cpu| self.contains(*cpu)).last().unwrap_or(first);
            if last == first {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for CoreSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CoreSet({self})")
    }
}

/// The kernel's list syntax. An empty text is the empty set. Strides (`0-31:1/2`) are refused.
impl FromStr for CoreSet {
    type Err = NotACoreSet;

    fn from_str(text: &str) -> Result<CoreSet, NotACoreSet> {
        let refused = |reason: String| Err(NotACoreSet { reason });
        let mut set = CoreSet::default();
        let text = text.trim();
        for part in text.split(',').filter(|_| !text.is_empty()) {
            let shown: String = part.chars().take(32).collect();
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (Ok(first), Ok(last)) = (first.trim().parse::<usize>(), last.trim().parse::<usize>()) else {
                return refused(format!("'{shown}' is neither a number nor a range"));
            };
            if first > last {
                return refused(format!("the range '{shown}' ends before it begins"));
            }
            if last >= CoreSet::LIMIT {
                return refused(format!("there is no CPU {last}: numbers are below {}", CoreSet::LIMIT));
            }
            (first..=last).for_each(|cpu| set.insert(cpu));
        }
        Ok(set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CoreSet {
        text.parse().unwrap()
    }

    #[test]
    fn a_set_is_read_and_written_as_the_kernel_does() {
        for text in ["", "0", "0-3", "0-3,8-11", "1,3,5", "62-65,1023"] {
            assert_eq!(set(text).to_string(), text);
        }
        assert_eq!(set(" 3, 1-2,2\n").to_string(), "1-3");
        assert_eq!(set("62-65").iter().collect::<Vec<_>>(), [62, 63, 64, 65]);
        assert_eq!((set("").len(), set("").is_empty(), set("0-3,8").len()), (0, true, 5));
    }

    #[test]
    fn what_is_no_set_is_refused_with_the_reason_and_an_example() {
        let error = |text: &str| text.parse::<CoreSet>().unwrap_err().to_string();
        let example = "; expected CPU numbers such as \"0\", \"0-3\" or \"0-3,8-11\"";
        assert_eq!(error("a"), format!("'a' is neither a number nor a range{example}"));
        assert_eq!(error("1,,2"), format!("'' is neither a number nor a range{example}"));
        assert_eq!(error("0-3-5"), format!("'0-3-5' is neither a number nor a range{example}"));
        assert_eq!(error("25%"), format!("'25%' is neither a number nor a range{example}"));
        assert_eq!(error("0-31:1/2"), format!("'0-31:1/2' is neither a number nor a range{example}"));
        assert_eq!(error("-1"), format!("'-1' is neither a number nor a range{example}"));
        assert_eq!(error("3-1"), format!("the range '3-1' ends before it begins{example}"));
        assert_eq!(error("0-1024"), format!("there is no CPU 1024: numbers are below 1024{example}"));
    }

    #[test]
    fn sets_are_put_together_and_compared() {
        let (a, b) = (set("0-3"), set("2-5"));
        assert_eq!([a.with(b), a.common(b), a.without(b)], [set("0-5"), set("2-3"), set("0-1")]);
    }
}
