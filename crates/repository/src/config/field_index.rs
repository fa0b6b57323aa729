//! The places of all fields in a protobuf text.
//!
//! The library that parses the text does not keep positions. It also needs a colon before the
//! bracket of `input [`, which hardly any configuration has. This scan knows no schema. It keeps
//! the place of every name and value, and the places of missing colons.

use std::collections::BTreeMap;

use crate::config::finding::Position;

/// Deepest nesting: the schema itself ends at seven.
const MAX_DEPTH: usize = 32;

/// The fields of a text by path, and the text in the library's form.
#[derive(Clone, Debug, Default)]
pub(crate) struct FieldIndex {
    /// Offset of the name, by path with every index written (`input[0].dims[0]`).
    names: BTreeMap<String, usize>,
    /// Path of the field whose name stands at an offset.
    by_name: BTreeMap<usize, String>,
    /// Path of the field whose value stands at an offset.
    by_value: BTreeMap<usize, String>,
    /// Offsets in the text before which a colon is missing, ascending.
    missing_colons: Vec<usize>,
    /// Offset of each line's first byte.
    lines: Vec<usize>,
    text: String,
}

/// The error of a text that is not even tokens, or too deep.
#[derive(Debug)]
pub(crate) struct ScanError {
    pub(crate) position: Position,
    pub(crate) message: String,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Token<'a> {
    Word(&'a str),
    String(&'a str),
    Mark(u8),
}

impl FieldIndex {
    /// Scans a text. The library reports other errors of the text format.
    pub(crate) fn scan(text: &str) -> Result<FieldIndex, ScanError> {
        let lines = std::iter::once(0).chain(text.bytes().enumerate().filter(|(_, b)| *b == b'\n').map(|(i, _)| i + 1));
        let mut index = FieldIndex { lines: lines.collect(), text: text.to_owned(), ..FieldIndex::default() };
        let fail = |index: &FieldIndex, (offset, message): (usize, String)| ScanError {
            position: index.position(offset),
            message,
        };
        let tokens = tokens(text).map_err(|e| fail(&index, e))?;
        let mut scanner = Scanner { tokens: &tokens, next: 0, index: &mut index };
        match scanner.message("", None, 0) {
            Ok(()) | Err(Stop::NotTextFormat) => {}
            Err(Stop::Refused(offset, message)) => return Err(fail(&index, (offset, message))),
        }
        Ok(index)
    }

    /// The text with the missing colons added.
    pub(crate) fn normalised(&self) -> String {
        let mut out = String::with_capacity(self.text.len() + self.missing_colons.len());
        let mut from = 0;
        for &at in &self.missing_colons {
            out.push_str(self.text.get(from..at).unwrap_or_default());
            out.push(':');
            from = at;
        }
        out.push_str(self.text.get(from..).unwrap_or_default());
        out
    }

    /// The offset in the text of an offset in [`FieldIndex::normalised`].
    pub(crate) fn original_offset(&self, normalised: usize) -> usize {
        let mut inserted = 0;
        for &at in &self.missing_colons {
            if at + inserted >= normalised {
                break;
            }
            inserted += 1;
        }
        normalised.saturating_sub(inserted).min(self.text.len())
    }

    /// Line and column of an offset.
    pub(crate) fn position(&self, offset: usize) -> Position {
        let line = self.lines.partition_point(|start| *start <= offset).max(1);
        let start = self.lines.get(line - 1).copied().unwrap_or(0);
        let column = self.text.get(start..offset).map_or(offset - start, |s| s.chars().count()) + 1;
        Position { line, column }
    }

    /// Line and column past the last character.
    pub(crate) fn end(&self) -> Position {
        self.position(self.text.trim_end().len())
    }

    /// The place of the field's name, or of the nearest written field around it.
    pub(crate) fn find(&self, path: &str) -> Option<Position> {
        let mut components: Vec<String> = split_path(path)
            .into_iter()
            .map(|c| if c.ends_with(']') { c.to_owned() } else { format!("{c}[0]") })
            .collect();
        while !components.is_empty() {
            if let Some(offset) = self.names.get(&components.join(".")) {
                return Some(self.position(*offset));
            }
            components.pop();
        }
        None
    }

    /// Whether the field of a path is written.
    pub(crate) fn contains(&self, path: &str) -> bool {
        self.names.contains_key(&format!("{path}[0]"))
    }

    /// Path of the field whose name, or else whose value, stands at an offset.
    pub(crate) fn field_at(&self, offset: usize) -> Option<At<'_>> {
        self.by_name.get(&offset).map(|p| At::Name(p)).or_else(|| self.by_value.get(&offset).map(|p| At::Value(p)))
    }

    /// The word at an offset.
    pub(crate) fn word_at(&self, offset: usize) -> &str {
        let rest = self.text.get(offset..).unwrap_or_default();
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        rest.get(..end).unwrap_or_default()
    }
}

/// The kind of text at an offset, with its field's path.
pub(crate) enum At<'a> {
    Name(&'a str),
    Value(&'a str),
}

/// The components of a path; a quoted map key may hold dots.
pub(crate) fn split_path(path: &str) -> Vec<&str> {
    let mut components = Vec::new();
    let (mut start, mut quoted) = (0, false);
    for (i, b) in path.bytes().enumerate() {
        match b {
            b'"' => quoted = !quoted,
            b'.' if !quoted => {
                components.extend(path.get(start..i));
                start = i + 1;
            }
            _ => {}
        }
    }
    components.extend(path.get(start..).filter(|c| !c.is_empty()));
    components
}

fn tokens(text: &str) -> Result<Vec<(usize, Token<'_>)>, (usize, String)> {
    let bytes = text.as_bytes();
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(&b) = bytes.get(at) {
        let start = at;
        match b {
            b' ' | b'\t' | b'\r' | b'\n' | 0x0b | 0x0c => at += 1,
            b'#' => at += bytes.iter().skip(at).take_while(|b| **b != b'\n').count(),
            b'"' | b'\'' => {
                at += 1;
                loop {
                    match bytes.get(at) {
                        Some(b'\\') => at += 2,
                        Some(b'\n' | 0) | None => return Err((start, "this string is not closed".to_owned())),
                        Some(c) => {
                            at += 1;
                            if *c == b {
                                break;
                            }
                        }
                    }
                }
                tokens.push((start, Token::String(text.get(start + 1..at - 1).unwrap_or_default())));
            }
            b'{' | b'}' | b'<' | b'>' | b'[' | b']' | b':' | b',' | b';' => {
                at += 1;
                tokens.push((start, Token::Mark(b)));
            }
            // The library recurses on `[domain/Type] {` without a bound, and no configuration needs
            // it.
            b'/' => return Err((start, "unexpected '/'; comments begin with '#'".to_owned())),
            b'-' | b'+' | b'.' | b'_' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => {
                at += bytes
                    .iter()
                    .skip(at)
                    .take_while(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'+' | b'.' | b'_'))
                    .count();
                tokens.push((start, Token::Word(text.get(start..at).unwrap_or_default())));
            }
            _ => {
                let found = text.get(start..).and_then(|rest| rest.chars().next()).unwrap_or('?');
                return Err((start, format!("unexpected character '{}'", found.escape_default())));
            }
        }
    }
    Ok(tokens)
}

/// The reason why the scan ended before the text did.
enum Stop {
    NotTextFormat,
    Refused(usize, String),
}

/// A field whose value is a word. If a mark follows, the word is the name of another field, and the
/// value is missing: `max_batch_size:` and `input [` in the next line.
struct WordField<'t> {
    name: &'t str,
    name_at: usize,
    word: &'t str,
    word_at: usize,
}

/// A field of a message, with one value or several.
struct Field<'n> {
    name: &'n str,
    /// The place of the name in the text.
    at: usize,
    /// The path of the message that holds the field.
    parent: &'n str,
    /// The path of the field, without the number of a value.
    path: String,
    /// The number of messages around the field's message.
    depth: usize,
}

struct Scanner<'a, 't> {
    tokens: &'a [(usize, Token<'t>)],
    next: usize,
    index: &'a mut FieldIndex,
}

impl<'t> Scanner<'_, 't> {
    fn peek(&self) -> Option<(usize, Token<'t>)> {
        self.tokens.get(self.next).copied()
    }

    /// Reads the fields of a message until `close` (the end of the text for the outermost message).
    fn message(&mut self, path: &str, close: Option<u8>, depth: usize) -> Result<(), Stop> {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        let mut before: Option<WordField<'_>> = None;
        loop {
            let Some((at, token)) = self.peek() else {
                return if close.is_none() { Ok(()) } else { Err(Stop::NotTextFormat) };
            };
            if depth > MAX_DEPTH {
                return Err(Stop::Refused(at, format!("nested deeper than {MAX_DEPTH} messages")));
            }
            self.next += 1;
            let name = match token {
                Token::Mark(b) if Some(b) == close => return Ok(()),
                Token::Word(name) => name,
                token => return Err(self.no_field(at, token, before.as_ref())),
            };
            before = None;
            let prefix = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
            let count = counts.entry(name).or_insert(0);
            if let Some((_, Token::Mark(b':'))) = self.peek() {
                self.next += 1;
            } else if let Some((bracket, Token::Mark(b'['))) = self.peek() {
                self.index.missing_colons.push(bracket);
            }
            let field = Field { name, at, parent: path, path: prefix, depth };
            if let Some((_, Token::Mark(b'['))) = self.peek() {
                self.next += 1;
                self.list(&field, count)?;
            } else {
                before = self.single(&field, count)?;
            }
            self.index.by_name.entry(at).or_insert(format!("{}[0]", field.path));
            if let Some((_, Token::Mark(b',' | b';'))) = self.peek() {
                self.next += 1;
                before = None;
            }
        }
    }

    /// Reads the values of a list, behind the opening bracket. Adds them to `count`.
    fn list(&mut self, field: &Field<'_>, count: &mut usize) -> Result<(), Stop> {
        self.index.names.entry(format!("{}[0]", field.path)).or_insert(field.at);
        loop {
            match self.peek() {
                Some((_, Token::Mark(b']'))) => {
                    self.next += 1;
                    return Ok(());
                }
                Some((_, Token::Mark(b','))) => self.next += 1,
                Some((value, _)) => {
                    self.value(field, *count, (value, value))?;
                    *count += 1;
                }
                None => return Err(Stop::NotTextFormat),
            }
        }
    }

    /// Reads the value of a field that is written once for each value, and counts the value.
    /// Returns the field if its value is one word.
    fn single<'n>(&mut self, field: &Field<'n>, count: &mut usize) -> Result<Option<WordField<'n>>, Stop>
    where
        't: 'n,
    {
        let first = self.next;
        let (value, token) = match self.peek() {
            Some((value, token @ (Token::Word(_) | Token::String(_) | Token::Mark(b'{' | b'<')))) => (value, token),
            _ => return Err(Stop::Refused(field.at, format!("{} has no value", field.name))),
        };
        self.value(field, *count, (field.at, value))?;
        *count += 1;
        Ok(match token {
            Token::Word(word) if self.next == first + 1 => {
                Some(WordField { name: field.name, name_at: field.at, word, word_at: value })
            }
            _ => None,
        })
    }

    /// The reason why no field begins with a token after the field `before`.
    fn no_field(&self, at: usize, token: Token<'_>, before: Option<&WordField<'_>>) -> Stop {
        match (token, before) {
            (Token::Mark(mark @ (b'[' | b'{' | b'<' | b':')), Some(field))
                if mark != b'[' || self.is_on_another_line(field) =>
            {
                let WordField { name, name_at, word, .. } = field;
                Stop::Refused(*name_at, format!("{name} has no value: the next word, '{word}', begins another field"))
            }
            (Token::Mark(b'['), _) => {
                let message = "'[' does not begin a field: extension fields are not part of a model configuration, and the values of a list follow its name";
                Stop::Refused(at, message.to_owned())
            }
            _ => Stop::NotTextFormat,
        }
    }

    fn is_on_another_line(&self, field: &WordField<'_>) -> bool {
        self.index.text.get(field.name_at..field.word_at).is_some_and(|text| text.contains('\n'))
    }

    /// Reads a message or a scalar.
    fn value(&mut self, field: &Field<'_>, index: usize, (name_at, value_at): (usize, usize)) -> Result<(), Stop> {
        let path = &format!("{}[{index}]", field.path);
        self.index.names.insert(path.clone(), name_at);
        if name_at != value_at {
            self.index.by_name.entry(name_at).or_insert(path.clone());
        }
        self.index.by_value.insert(value_at, path.clone());
        match self.peek() {
            Some((_, Token::Mark(open @ (b'{' | b'<')))) => {
                self.next += 1;
                self.message(path, Some(if open == b'{' { b'}' } else { b'>' }), field.depth + 1)
            }
            Some((_, token @ (Token::String(_) | Token::Word(_)))) => {
                if field.name == "key"
                    && let Some((map, _)) = field.parent.rsplit_once('[')
                    && let Token::String(key) | Token::Word(key) = token
                {
                    let entry = self.index.names.get(field.parent).copied().unwrap_or(name_at);
                    self.index.names.insert(format!("{map}[\"{key}\"]"), entry);
                }
                self.next += 1;
                // Neighbouring strings are one string; a sign may stand apart from its number.
                while let Some((_, following)) = self.peek()
                    && (matches!((token, following), (Token::String(_), Token::String(_)))
                        || token == Token::Word("-") && matches!(following, Token::Word(_)))
                {
                    self.next += 1;
                }
                Ok(())
            }
            _ => Err(Stop::NotTextFormat),
        }
    }
}
