//! An option of `downbeat serve`: its names, the form of its value, the place where the value goes,
//! and its help.

use downbeat_service::options::ModelOptions;

use crate::options::draft::Draft;
use crate::options::forms::{Form, Given, switch};

/// How often a flag's value may be given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arity {
    /// Once.
    One,
    /// Once, or left out for `true`.
    Optional,
    /// Any number of times, also several values divided by commas.
    Many,
    /// As [`Arity::Many`], but commas are part of the value.
    Repeated,
    /// Never: the flag stands alone.
    Bare,
}

type Set<D> = Box<dyn Fn(&mut D, &Given<'_>) -> Result<(), String> + Send + Sync>;

/// An option, which sets a value in a `D`.
pub struct Key<D> {
    /// The path in `downbeat.toml`; empty: the option is only a flag.
    pub path: &'static str,
    /// The flag, without the dashes; empty: the option is only in files.
    pub flag: &'static str,
    /// Other names of the flag, which are Triton's.
    pub alias: &'static str,
    /// The heading of the option's group in `--help`.
    pub heading: &'static str,
    /// The help text.
    pub help: String,
    /// The placeholder of the value in `--help`.
    pub unit: &'static str,
    /// The allowed values, in words.
    #[cfg_attr(not(test), expect(dead_code, reason = "for the pages, which a test writes"))]
    pub values: String,
    /// The names of the values, if the set of values is closed.
    pub choices: Vec<&'static str>,
    /// The default, in the form of a file; empty: none.
    pub default: String,
    /// The behaviour without a value, if there is no default.
    pub without: &'static str,
    /// An example value if there is no default, in the form of a file.
    #[cfg_attr(not(test), expect(dead_code, reason = "for the pages, which a test writes"))]
    pub example: &'static str,
    /// How often the flag's value may be given.
    pub arity: Arity,
    /// Whether help hides the option: it exists for Triton's users, or for older files.
    pub is_hidden: bool,
    /// Whether the option is about models: an options file in a model repository may set it.
    pub is_of_models: bool,
    /// Sets the value.
    pub set: Set<D>,
}

impl<D> std::fmt::Debug for Key<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.path, self.flag)
    }
}

/// A key that sets the value at `place`.
pub fn key<T: 'static>(path: &'static str, form: Form<T>, place: fn(&mut Draft) -> &mut T) -> Key<Draft> {
    let default = (form.write)(place(&mut Draft::default()));
    Key { default, path, ..flag("", form, move |draft, value| *place(draft) = value) }
}

/// A key of an optional value; `without` names the behaviour without it.
pub fn optional<T: 'static>(
    path: &'static str,
    form: Form<T>,
    place: fn(&mut Draft) -> &mut Option<T>,
    without: &'static str,
    example: &'static str,
) -> Key<Draft> {
    Key { path, without, example, ..flag("", form, move |draft, value| *place(draft) = Some(value)) }
}

/// As [`optional`], for the options of one model.
pub fn of_model<T: 'static>(
    path: &'static str,
    form: Form<T>,
    place: fn(&mut ModelOptions) -> &mut Option<T>,
    without: &'static str,
    example: &'static str,
) -> Key<ModelOptions> {
    Key { path, without, example, ..flag("", form, move |model, value| *place(model) = Some(value)) }
}

/// A flag without a key in files.
pub fn flag<D, T: 'static>(
    flag: &'static str,
    form: Form<T>,
    set: impl Fn(&mut D, T) + Send + Sync + 'static,
) -> Key<D> {
    let Form { unit, values, choices, is_list, read, .. } = form;
    Key {
        path: "",
        flag,
        alias: "",
        heading: "",
        help: String::new(),
        unit,
        values,
        choices,
        default: String::new(),
        without: "",
        example: "",
        arity: if is_list { Arity::Many } else { Arity::One },
        is_hidden: false,
        is_of_models: false,
        set: Box::new(move |draft, given| read(given).map(|value| set(draft, value))),
    }
}

/// A flag without a value.
pub fn bare(name: &'static str, help: &str, set: fn(&mut Draft)) -> Key<Draft> {
    Key { arity: Arity::Bare, ..flag(name, switch(), move |draft, _| set(draft)).help(help) }
}

/// A flag of Triton that has a meaning here.
pub fn triton<T: 'static>(name: &'static str, form: Form<T>, set: fn(&mut Draft, T)) -> Key<Draft> {
    Key { is_hidden: true, ..flag(name, form, set) }
}

impl<D> Key<D> {
    /// Sets the help text.
    pub fn help(self, help: impl Into<String>) -> Self {
        Key { help: help.into(), ..self }
    }

    /// Sets the flag and the help text.
    pub fn flag(self, flag: &'static str, help: impl Into<String>) -> Self {
        Key { flag, ..self.help(help) }
    }

    /// Sets another name of the flag.
    pub fn alias(self, alias: &'static str) -> Self {
        Key { alias, ..self }
    }

    /// Sets the behaviour without a value, and an example; the default is not shown.
    pub fn unless(self, without: &'static str, example: &'static str) -> Self {
        Key { without, example, ..self }
    }

    /// Allows the key in an options file of a model repository.
    pub fn of_models(self) -> Self {
        Key { is_of_models: true, ..self }
    }

    /// Sets how often the flag's value may be given.
    pub fn arity(self, arity: Arity) -> Self {
        Key { arity, ..self }
    }

    /// The environment variable of the option; empty: none.
    pub fn variable(&self) -> String {
        match self.is_hidden || self.flag.is_empty() || self.arity == Arity::Bare {
            true => String::new(),
            false => format!("DOWNBEAT_{}", self.flag.to_uppercase().replace('-', "_")),
        }
    }
}
