//! The form of a log line: one event is one line, also with hostile values.

use std::fmt::{self, Debug, Write};

use tracing::field::Field;
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{FieldFn, Writer, debug_fn};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::levels;
use super::limits::LineLimits;

/// Writes an event as its format `F` does, unless there were too many of its kind. No value of it
/// can end the line early or reach the terminal as a control sequence.
pub struct Line<F> {
    pub format: F,
    pub limits: LineLimits,
    /// Whether the lines are JSON objects.
    pub is_json: bool,
}

impl<S, N, F> FormatEvent<S, N> for Line<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        if levels::is_muted(*event.metadata().level()) {
            return Ok(());
        }
        let Some(left_out) = self.limits.admit(event) else { return Ok(()) };
        let mut line = String::new();
        self.format.format_event(ctx, Writer::new(&mut line), event)?;
        let line = line.trim_end_matches('\n');
        match (self.is_json, left_out) {
            (false, 0) => writeln!(writer, "{line}"),
            (false, _) => writeln!(writer, "{line} left_out={left_out}"),
            (true, _) => {
                let object = line.strip_suffix('}').unwrap_or(line);
                write_safe(&mut writer, object, |writer, c| write!(writer, "\\u{:04x}", u32::from(c)))?;
                if left_out > 0 {
                    write!(writer, ",\"left_out\":{left_out}")?;
                }
                writer.write_str("}\n")
            }
        }
    }
}

/// Writes the fields of an event as text.
pub fn text_field() -> FieldFn<impl Fn(&mut Writer<'_>, &Field, &dyn Debug) -> fmt::Result + Clone> {
    debug_fn(|writer, field, value| {
        let (italic, dimmed, end) =
            if writer.has_ansi_escapes() { ("\x1b[3m", "\x1b[2m", "\x1b[0m") } else { ("", "", "") };
        if field.name() != "message" {
            write!(writer, "{italic}{}{end}{dimmed}={end}", field.name())?;
        }
        write!(Escaped(writer), "{value:?}")
    })
}

/// A text on one line that commands no terminal: a model's name may have any character.
pub fn escaped(text: impl fmt::Display) -> String {
    let mut line = String::new();
    // A `String` takes every text.
    let _ = write!(Escaped(&mut line), "{text}");
    line
}

/// Escapes characters that a line of text must not have.
struct Escaped<'a, W>(&'a mut W);

impl<W: Write> Write for Escaped<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        write_safe(self.0, text, |writer, c| write!(writer, "{}", c.escape_default()))
    }
}

/// Writes a text. `escape` writes each character that would begin another line, command a terminal,
/// or change the order of the rest.
fn write_safe<W: Write>(writer: &mut W, text: &str, escape: impl Fn(&mut W, char) -> fmt::Result) -> fmt::Result {
    let mut safe = 0;
    for (at, c) in text.char_indices() {
        let is_harmful = c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if is_harmful {
            writer.write_str(&text[safe..at])?;
            escape(writer, c)?;
            safe = at + c.len_utf8();
        }
    }
    writer.write_str(&text[safe..])
}
