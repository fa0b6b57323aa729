//! Enums whose values have one name each, in flags and in files alike.

/// Declares an enum whose variants have one name each, in flags and in `downbeat.toml` alike.
#[macro_export]
macro_rules! named {
    ($(#[$meta:meta])* $name:ident as $what:literal { $($(#[$variant_meta:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum $name {
            $($(#[$variant_meta])* $variant,)+
        }

        impl $name {
            /// Every value, in the order of the documentation.
            pub const ALL: &'static [$name] = &[$($name::$variant),+];

            /// The names of all values.
            pub fn names() -> impl Iterator<Item = &'static str> {
                Self::ALL.iter().map(|value| value.name())
            }

            /// The name in flags and files.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $text),+ }
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl ::std::str::FromStr for $name {
            type Err = $crate::UnknownName;

            fn from_str(s: &str) -> Result<Self, $crate::UnknownName> {
                Self::ALL.iter().copied().find(|v| v.name() == s).ok_or_else(|| $crate::UnknownName::new($what, s, Self::names()))
            }
        }
    };
}
